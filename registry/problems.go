package registry

import (
	"errors"
	"fmt"
	"strconv"
)

// FieldError says which field of a Layout or Peer is wrong. Err wraps a sentinel of package
// nixlkv and says what was expected and what was found.
type FieldError struct {
	Field string // as in Go: KV[3].ItemLen, Ranks.TPRank
	Err   error
}

// Error names the field before the cause.
func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap gives the cause.
func (e *FieldError) Unwrap() error { return e.Err }

// maxProblems is how many problems are told one by one. A layout of thousands of regions with
// one mistake in how it was made has the same problem thousands of times.
const maxProblems = 32

// problems collects what is wrong.
type problems struct {
	errs []error
	more int
}

func (p *problems) add(field string, sentinel error, format string, args ...any) {
	if len(p.errs) == maxProblems {
		p.more++
		return
	}
	p.errs = append(p.errs, &FieldError{
		Field: field, Err: fmt.Errorf("%w: %s", sentinel, fmt.Sprintf(format, args...)),
	})
}

func (p *problems) count() int { return len(p.errs) + p.more }

// err joins the problems; nil if there are none.
func (p *problems) err() error {
	if p.more > 0 {
		return errors.Join(append(p.errs, fmt.Errorf("and %d more", p.more))...)
	}
	return errors.Join(p.errs...)
}

// index names a field of a list's entry.
func index(list string, i int, field string) string {
	s := list + "[" + strconv.Itoa(i) + "]"
	if field == "" {
		return s
	}
	return s + "." + field
}
