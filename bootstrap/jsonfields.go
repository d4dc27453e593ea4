package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"

	"github.com/nixlkv/nixlkv"
)

// fields reads a JSON object key by key and gathers what is wrong with it. Keys count as
// they are written; decoding into a struct would match them in any case, and an unknown key
// could then overwrite a known one.
type fields struct {
	raw  map[string]json.RawMessage
	errs []error
}

func parseFields(b []byte) (*fields, error) {
	f := &fields{}
	if err := json.Unmarshal(b, &f.raw); err != nil {
		return nil, fmt.Errorf("%w: %w", nixlkv.ErrMalformed, err)
	}
	if f.raw == nil {
		return nil, fmt.Errorf("%w: null instead of an object", nixlkv.ErrMalformed)
	}
	return f, nil
}

// err gives everything found wrong so far, wrapping nixlkv.ErrMalformed.
func (f *fields) err() error {
	if len(f.errs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", nixlkv.ErrMalformed, errors.Join(f.errs...))
}

func (f *fields) fail(key, format string, args ...any) {
	f.errs = append(f.errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
}

// get gives the value of a key; nil if it is absent or null.
func (f *fields) get(key string) json.RawMessage {
	v := f.raw[key]
	if string(v) == "null" {
		return nil
	}
	return v
}

// number reads an integer from lo to hi that must be there.
func (f *fields) number(key string, lo, hi int) int {
	if f.get(key) == nil {
		f.fail(key, "missing")
		return 0
	}
	return f.optionalNumber(key, lo, hi)
}

// optionalNumber gives 0 if the key is absent or null.
func (f *fields) optionalNumber(key string, lo, hi int) int {
	v := f.get(key)
	if v == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil || n < int64(lo) || n > int64(hi) {
		f.fail(key, "%s is not a whole number from %d to %d", excerpt(v), lo, hi)
		return 0
	}
	return int(n)
}

// text gives "" if the key is absent or null.
func (f *fields) text(key string) string {
	v := f.get(key)
	if v == nil {
		return ""
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil || len(s) > maxText {
		f.fail(key, "%s is not a string of at most %d bytes", excerpt(v), maxText)
		return ""
	}
	return s
}

func (f *fields) flag(key string, absent bool) bool {
	switch v := f.get(key); string(v) {
	case "":
		return absent
	case "true":
		return true
	case "false":
		return false
	default:
		f.fail(key, "%s is neither true nor false", excerpt(v))
		return absent
	}
}

// object gives a JSON object as it is, compacted; nil if the key is absent or null.
func (f *fields) object(key string) json.RawMessage {
	v := f.get(key)
	if v == nil {
		return nil
	}
	if v[0] != '{' {
		f.fail(key, "%s is not an object", excerpt(v))
		return nil
	}
	var b bytes.Buffer
	if err := json.Compact(&b, v); err != nil {
		f.fail(key, "%v", err)
		return nil
	}
	return b.Bytes()
}

// maxText bounds strings such as a dtype's name.
const maxText = 256

// excerpt quotes as much of b as an error or a log line should carry.
func excerpt(b []byte) string {
	const most = 128
	if len(b) > most {
		return strconv.Quote(string(b[:most])) + "…"
	}
	return strconv.Quote(string(b))
}

// differingKeys compares two JSON objects and gives the keys whose values differ, sorted;
// nil stands for the empty object. Numbers are compared by value, as Python does.
func differingKeys(a, b json.RawMessage) ([]string, error) {
	x, err := decodeObject(a)
	if err != nil {
		return nil, err
	}
	y, err := decodeObject(b)
	if err != nil {
		return nil, err
	}
	var keys []string
	for k, v := range x {
		if w, ok := y[k]; !ok || !reflect.DeepEqual(v, w) {
			keys = append(keys, k)
		}
	}
	for k := range y {
		if _, ok := x[k]; !ok {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys, nil
}

func decodeObject(raw json.RawMessage) (map[string]any, error) {
	if raw == nil {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return nil, fmt.Errorf("%w: %w", nixlkv.ErrMalformed, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: more than one JSON value", nixlkv.ErrMalformed)
	}
	for k, v := range m {
		m[k] = byValue(v)
	}
	return m, nil
}

// byValue replaces number literals in place, so that 1, 1.0 and 1e0 are equal.
func byValue(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		x, err := v.Float64()
		if err != nil {
			return v
		}
		if n := int64(x); float64(n) == x && n > -1<<53 && n < 1<<53 {
			return n
		}
		return x
	case []any:
		for i := range v {
			v[i] = byValue(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = byValue(v[k])
		}
	}
	return v
}
