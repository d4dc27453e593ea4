package environ

import (
	"errors"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func reader(vars map[string]string) *Reader {
	return &Reader{Lookup: func(name string) (string, bool) { v, ok := vars[name]; return v, ok }}
}

func TestValues(t *testing.T) {
	r := reader(map[string]string{"int": " 7", "float": "2.5", "yes": "Y", "no": "0", "empty": "", "map": `{"a":"b"}`, "none": "{}"})
	if n, ok := r.Int("int"); n != 7 || !ok {
		t.Errorf("int: %d, %t", n, ok)
	}
	if d, ok := r.Seconds("float"); d != 2500*time.Millisecond || !ok {
		t.Errorf("seconds: %v, %t", d, ok)
	}
	if d, ok := r.Seconds("int"); d != 7*time.Second || !ok {
		t.Errorf("whole seconds: %v, %t", d, ok)
	}
	if !r.Bool("yes") || r.Bool("no") || r.Bool("missing") {
		t.Error("booleans")
	}
	if _, ok := r.String("empty"); ok {
		t.Error("an empty variable counts as set")
	}
	if m, ok := r.Strings("map"); !ok || m["a"] != "b" {
		t.Errorf("map: %v, %t", m, ok)
	}
	if _, ok := r.Strings("none"); ok {
		t.Error("an empty object counts as set")
	}
	if r.Err != nil {
		t.Error(r.Err)
	}
}

func TestMalformed(t *testing.T) {
	for _, v := range []string{"x", "-1", "0", "1e99", "NaN", "inf"} {
		r := reader(map[string]string{"v": v})
		if _, ok := r.Seconds("v"); ok || !errors.Is(r.Err, nixlkv.ErrMalformed) {
			t.Errorf("seconds %q: %t, %v", v, ok, r.Err)
		}
		r = reader(map[string]string{"v": v})
		if _, ok := r.Int("v"); ok || !errors.Is(r.Err, nixlkv.ErrMalformed) {
			t.Errorf("int %q: %t, %v", v, ok, r.Err)
		}
	}
	r := reader(map[string]string{"v": "maybe", "w": "[]"})
	r.Bool("v")
	first := r.Err
	if _, ok := r.Strings("w"); ok || !errors.Is(first, nixlkv.ErrMalformed) || r.Err != first {
		t.Errorf("%v, then %v", first, r.Err)
	}
	r = reader(map[string]string{"x": "null"})
	if _, ok := r.Strings("x"); ok || r.Err == nil {
		t.Error("null is taken for an object")
	}
}
