package kvsender

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv"
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
	e := envReader{lookup: lookup}
	var opts []Option
	if s, ok := e.int(EnvBootstrapTimeout); ok {
		opts = append(opts, WithBootstrapTimeout(time.Duration(s)*time.Second))
	}
	if n, ok := e.int(EnvQueueSize); ok {
		opts = append(opts, WithWorkers(n))
	}
	backend, hasBackend := e.string(EnvNIXLBackend)
	params, hasParams := e.params(EnvNIXLParams)
	if hasBackend || hasParams {
		if backend == "" {
			backend = defaultConfig().backend
		}
		opts = append(opts, WithBackend(backend, params))
	}
	if e.bool(EnvAllCPRanks) {
		opts = append(opts, WithAllCPRanks())
	}
	if e.bool(EnvForceQuery) {
		opts = append(opts, WithForceQuery())
	}
	if e.bool(EnvStagingBuffer) {
		opts = append(opts, WithStagingBuffer(0))
	}
	if e.err != nil {
		return nil, e.err
	}
	return opts, nil
}

// envReader reads variables, keeping the first error.
type envReader struct {
	lookup func(string) (string, bool)
	err    error
}

func (e *envReader) string(name string) (string, bool) {
	v, ok := e.lookup(name)
	return v, ok && v != ""
}

func (e *envReader) malformed(name, value, want string) {
	if e.err == nil {
		e.err = fmt.Errorf("kvsender: %w: %s=%q, want %s", nixlkv.ErrMalformed, name, value, want)
	}
}

func (e *envReader) int(name string) (int, bool) {
	v, ok := e.string(name)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(v))
	if err != nil || n <= 0 || n > 1<<30 {
		e.malformed(name, v, "a positive number")
		return 0, false
	}
	return n, true
}

// bool reads what SGLang's EnvBool takes.
func (e *envReader) bool(name string) bool {
	v, ok := e.string(name)
	if !ok {
		return false
	}
	switch strings.ToLower(v) {
	case "true", "1", "yes", "y":
		return true
	case "false", "0", "no", "n":
		return false
	}
	e.malformed(name, v, "true or false")
	return false
}

func (e *envReader) params(name string) (map[string]string, bool) {
	v, ok := e.string(name)
	if !ok {
		return nil, false
	}
	var m map[string]string
	if err := json.Unmarshal([]byte(v), &m); err != nil || m == nil {
		e.malformed(name, v, "a JSON object with string values")
		return nil, false
	}
	return m, len(m) > 0
}
