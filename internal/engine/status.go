package engine

import "strconv"

// Status is a result of NIXL's C API (nixl_capi_status_t). Negative ones are errors, and
// a Status can be compared with errors.Is to what an error wraps.
type Status int32

// The statuses of NIXL's C API.
const (
	InProgress      Status = 1
	Success         Status = 0
	ErrInvalidParam Status = -1
	ErrBackend      Status = -2
	ErrInvalidState Status = -3
	ErrException    Status = -4
	ErrNoTelemetry  Status = -5
	ErrNotFound     Status = -6
)

// NotPosted is no status of NIXL's: it is that of a transfer that was never posted.
const NotPosted Status = -1 << 31

var statusNames = map[Status]string{
	InProgress:      "NIXL_CAPI_IN_PROG",
	Success:         "NIXL_CAPI_SUCCESS",
	ErrInvalidParam: "NIXL_CAPI_ERROR_INVALID_PARAM",
	ErrBackend:      "NIXL_CAPI_ERROR_BACKEND",
	ErrInvalidState: "NIXL_CAPI_ERROR_INVALID_STATE",
	ErrException:    "NIXL_CAPI_ERROR_EXCEPTION",
	ErrNoTelemetry:  "NIXL_CAPI_ERROR_NO_TELEMETRY",
	ErrNotFound:     "NIXL_CAPI_ERROR_NOT_FOUND",
	NotPosted:       "not posted",
}

// Name gives NIXL's name of the status, or "" for a number it does not know.
func (s Status) Name() string { return statusNames[s] }

// Error gives NIXL's name and number. It works before any library is loaded.
func (s Status) Error() string {
	n := s.Name()
	if n == "" {
		n = "unknown NIXL status"
	}
	return n + " (" + strconv.Itoa(int(s)) + ")"
}

// String is Error.
func (s Status) String() string { return s.Error() }

// Err gives nil for Success and InProgress, else the status itself.
func (s Status) Err() error {
	if s >= 0 {
		return nil
	}
	return s
}
