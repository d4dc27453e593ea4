package kvreceiver

import (
	"fmt"
	"os"

	"github.com/nixlkv/nixlkv/internal/environ"
)

// The variables that FromEnv reads. Names, meanings and defaults are those of SGLang
// (sglang/srt/environ.py, release 0.5.23).
const (
	EnvWaitingTimeout    = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"                    // seconds, 300
	EnvHeartbeatInterval = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"                 // seconds, 5, at least 2
	EnvHeartbeatFailures = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"              // 2
	EnvSendTimeout       = "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT"                   // seconds
	EnvReleaseTimeout    = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT" // seconds, 30
	EnvNIXLBackend       = "SGLANG_DISAGGREGATION_NIXL_BACKEND"                       // UCX
	EnvNIXLParams        = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"                // JSON object of strings, {}
	EnvAllCPRanks        = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"              // false
	EnvForceQuery        = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"        // false
	EnvStagingBuffer     = "SGLANG_DISAGG_STAGING_BUFFER"                             // false; true is not supported
	EnvDeferredRelease   = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"         // read by prefills; this side always waits for acknowledgements
)

// FromEnv gives the options that operators have set for SGLang in the environment.
// SGLANG_DISAGG_STAGING_BUFFER, where it is on, makes NewManager fail with
// nixlkv.ErrUnsupported. A value that SGLang would not take is an error that wraps
// nixlkv.ErrMalformed.
func FromEnv() ([]Option, error) { return fromEnv(os.LookupEnv) }

func fromEnv(lookup func(string) (string, bool)) ([]Option, error) {
	e := environ.Reader{Lookup: lookup}
	var opts []Option
	if d, ok := e.Seconds(EnvWaitingTimeout); ok {
		opts = append(opts, WithWaitingTimeout(d))
	}
	if d, ok := e.Seconds(EnvSendTimeout); ok {
		opts = append(opts, WithSendTimeout(d))
	}
	if d, ok := e.Seconds(EnvReleaseTimeout); ok {
		opts = append(opts, WithReleaseTimeout(d))
	}
	interval, hasInterval := e.Seconds(EnvHeartbeatInterval)
	failures, hasFailures := e.Int(EnvHeartbeatFailures)
	if hasInterval || hasFailures {
		if !hasInterval {
			interval = DefaultHeartbeatInterval
		}
		if !hasFailures {
			failures = DefaultHeartbeatFailures
		}
		opts = append(opts, WithHeartbeat(interval, failures))
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
		opts = append(opts, func(c *config) { c.staging = true })
	}
	if e.Err != nil {
		return nil, fmt.Errorf("kvreceiver: %w", e.Err)
	}
	return opts, nil
}
