package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// StagingError says why staging buffers, which were asked for, cannot be had. It wraps
// nixlkv.ErrUnsupported.
type StagingError struct{ Why string }

// Error gives the reason.
func (e *StagingError) Error() string { return "kvsender: staging buffers: " + e.Why }

// Unwrap gives nixlkv.ErrUnsupported.
func (e *StagingError) Unwrap() error { return nixlkv.ErrUnsupported }

// WithStagingBuffer asks for SGLang's staging buffers (SGLANG_DISAGG_STAGING_BUFFER), with
// prefill chunks of so many tokens, 0 if that is not known. This library has none: NewManager
// gives a *StagingError, with SGLang's own reason where SGLang would refuse too.
func WithStagingBuffer(chunkTokens int) Option {
	return func(c *config) { c.staging, c.stagingChunk = true, chunkTokens }
}

// checkStaging refuses staging buffers. The reasons before the last are those of SGLang
// (StagingManagerMixin in common/staging_handler.py and its users).
func checkStaging(l *registry.Layout, chunkTokens int) error {
	r := l.Ranks.Normalized()
	switch {
	case r.PP > 1:
		return &StagingError{fmt.Sprintf("not with pipeline parallelism (PP %d)", r.PP)}
	case l.MLA || l.HybridMLA:
		return &StagingError{"not with MLA, whose pages need no staging"}
	case r.CP > 1:
		return &StagingError{fmt.Sprintf("not with context parallelism (CP %d)", r.CP)}
	case chunkTokens > 0 && l.PageSize > 0 && chunkTokens%l.PageSize != 0:
		return &StagingError{fmt.Sprintf("a prefill chunk of %d tokens is not a multiple of the page size %d", chunkTokens, l.PageSize)}
	}
	return &StagingError{"this library has none"}
}
