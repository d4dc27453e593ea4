package kvsender

import (
	"fmt"
	"os"
	"time"

	"github.com/nixlkv/nixlkv/internal/environ"
)

// The variables that FromEnv reads. Names, meanings and defaults are those of SGLang
// (sglang/srt/environ.py, release 0.5.23).
const (
	EnvBootstrapTimeout = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"           // seconds, 300
	EnvQueueSize        = "SGLANG_DISAGGREGATION_QUEUE_SIZE"                  // transfer queues, 4
	EnvNIXLBackend      = "SGLANG_DISAGGREGATION_NIXL_BACKEND"                // UCX
	EnvNIXLParams       = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"         // JSON object of strings, {}
	EnvAllCPRanks       = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"       // false
	EnvForceQuery       = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK" // false
	EnvStagingBuffer    = "SGLANG_DISAGG_STAGING_BUFFER"                      // false; true is not supported
	EnvDeferredRelease  = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"  // read by decodes; this side always acknowledges
)

// FromEnv gives the options that operators have set for SGLang in the environment.
// SGLANG_DISAGG_STAGING_BUFFER, where it is on, makes NewManager fail with a *StagingError:
// this library has no staging buffers. A value that SGLang would not take is an error that
// wraps nixlkv.ErrMalformed.
func FromEnv() ([]Option, error) { return fromEnv(os.LookupEnv) }

func fromEnv(lookup func(string) (string, bool)) ([]Option, error) {
	e := environ.Reader{Lookup: lookup}
	var opts []Option
	if s, ok := e.Int(EnvBootstrapTimeout); ok {
		opts = append(opts, WithBootstrapTimeout(time.Duration(s)*time.Second))
	}
	if n, ok := e.Int(EnvQueueSize); ok {
		opts = append(opts, WithWorkers(n))
	}
	backend, hasBackend := e.String(EnvNIXLBackend)
	params, hasParams := e.Strings(EnvNIXLParams)
	if hasBackend || hasParams {
		if backend == "" {
			backend = defaultConfig().backend
		}
		opts = append(opts, WithBackend(backend, params))
	}
	if e.Bool(EnvAllCPRanks) {
		opts = append(opts, WithAllCPRanks())
	}
	if e.Bool(EnvForceQuery) {
		opts = append(opts, WithForceQuery())
	}
	if e.Bool(EnvStagingBuffer) {
		opts = append(opts, WithStagingBuffer(0))
	}
	if e.Err != nil {
		return nil, fmt.Errorf("kvsender: %w", e.Err)
	}
	return opts, nil
}
