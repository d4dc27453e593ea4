// Package environ reads variables of the environment as SGLang reads its own
// (sglang/srt/environ.py), so that both sides take the settings of operators alike.
package environ

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv"
)

// Reader reads variables and keeps the first error, which wraps nixlkv.ErrMalformed. A
// variable that is empty counts as not set.
type Reader struct {
	// Lookup gives a variable; os.LookupEnv is one.
	Lookup func(name string) (string, bool)
	// Err is the first value that SGLang would not take.
	Err error
}

// String gives a variable, and whether it is set.
func (r *Reader) String(name string) (string, bool) {
	v, ok := r.Lookup(name)
	return v, ok && v != ""
}

func (r *Reader) malformed(name, value, want string) {
	if r.Err == nil {
		r.Err = fmt.Errorf("%w: %s=%q, want %s", nixlkv.ErrMalformed, name, value, want)
	}
}

// Int gives a positive number.
func (r *Reader) Int(name string) (int, bool) {
	v, ok := r.String(name)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(v))
	if err != nil || n <= 0 || n > 1<<30 {
		r.malformed(name, v, "a positive number")
		return 0, false
	}
	return n, true
}

// Seconds gives a positive duration, told in seconds with or without a fraction.
func (r *Reader) Seconds(name string) (time.Duration, bool) {
	v, ok := r.String(name)
	if !ok {
		return 0, false
	}
	s, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
	if err != nil || math.IsNaN(s) || s <= 0 || s > 1<<30 {
		r.malformed(name, v, "a positive number of seconds")
		return 0, false
	}
	return time.Duration(s * float64(time.Second)), true
}

// Bool says whether a variable is set to what SGLang's EnvBool takes for true.
func (r *Reader) Bool(name string) bool {
	v, ok := r.String(name)
	if !ok {
		return false
	}
	switch strings.ToLower(v) {
	case "true", "1", "yes", "y":
		return true
	case "false", "0", "no", "n":
		return false
	}
	r.malformed(name, v, "true or false")
	return false
}

// Strings gives a JSON object of strings, and whether it has any.
func (r *Reader) Strings(name string) (map[string]string, bool) {
	v, ok := r.String(name)
	if !ok {
		return nil, false
	}
	var m map[string]string
	if err := json.Unmarshal([]byte(v), &m); err != nil || m == nil {
		r.malformed(name, v, "a JSON object with string values")
		return nil, false
	}
	return m, len(m) > 0
}
