package bootstrap

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// StatusError is an answer of the bootstrap server other than 200. It wraps the sentinel that
// says what the code means for the request:
//
//	400  nixlkv.ErrMismatch if a rank registers, else nixlkv.ErrMalformed
//	404  nixlkv.ErrNoSuchRank if a rank is asked for, else nixlkv.ErrUnsupported
//	405  nixlkv.ErrUnsupported
//	413, 429  nixlkv.ErrLimit
//	503  nixlkv.ErrNotReady
//
// Other codes wrap nothing.
type StatusError struct {
	Request string // method and path
	Code    int
	Text    string // the beginning of the body

	meaning error
}

func newStatusError(method, path string, code int, text string) *StatusError {
	e := &StatusError{Request: method + " " + path, Code: code, Text: text}
	route := path == pathRoute
	switch {
	case code == http.StatusBadRequest && route && method == http.MethodPut:
		e.meaning = nixlkv.ErrMismatch
	case code == http.StatusBadRequest:
		e.meaning = nixlkv.ErrMalformed
	case code == http.StatusNotFound && route && method == http.MethodGet:
		e.meaning = nixlkv.ErrNoSuchRank
	case code == http.StatusNotFound, code == http.StatusMethodNotAllowed:
		e.meaning = nixlkv.ErrUnsupported
	case code == http.StatusRequestEntityTooLarge, code == http.StatusTooManyRequests:
		e.meaning = nixlkv.ErrLimit
	case code == http.StatusServiceUnavailable:
		e.meaning = nixlkv.ErrNotReady
	}
	return e
}

func (e *StatusError) Error() string {
	prefix := "bootstrap"
	if e.meaning != nil && !strings.Contains(e.Text, e.meaning.Error()) { // this package's server says it itself
		prefix = e.meaning.Error()
	}
	return fmt.Sprintf("%s: %s answered %d %s: %q", prefix, e.Request, e.Code, http.StatusText(e.Code), e.Text)
}

// Unwrap gives the sentinel, or nil.
func (e *StatusError) Unwrap() error { return e.meaning }

// transient tells whether the same request may be answered otherwise later.
func (e *StatusError) transient() bool {
	return e.Code >= http.StatusInternalServerError && e.Code != http.StatusNotImplemented ||
		e.Code == http.StatusTooManyRequests || e.Code == http.StatusRequestTimeout
}
