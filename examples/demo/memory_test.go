package main

import (
	"errors"
	"math"
	"testing"
	"testing/fstest"
)

func TestAvailableMemory(t *testing.T) {
	const meminfo = "MemTotal:       24683520 kB\nMemFree:         1000000 kB\nMemAvailable:       4096 kB\nBuffers: 1 kB\n"
	for name, c := range map[string]struct {
		meminfo, limit string
		want           int64
		ok             bool
	}{
		"no container":       {meminfo, "", 4 << 20, true},
		"container, no max":  {meminfo, "max\n", 4 << 20, true},
		"container, smaller": {meminfo, "1048576\n", 1 << 20, true},
		"container, larger":  {meminfo, "1073741824\n", 4 << 20, true},
		"container, garbage": {meminfo, "-5 apples", 4 << 20, true},
		"nothing":            {"", "1048576\n", 0, false},
		"old kernel":         {"MemTotal: 5 kB\n", "", 0, false},
		"no number":          {"MemAvailable: some kB\n", "", 0, false},
		"no unit":            {"MemAvailable: 5\n", "", 0, false},
		"too large":          {"MemAvailable: 9999999999999999 kB\n", "", 0, false},
	} {
		root := fstest.MapFS{}
		if c.meminfo != "" {
			root["proc/meminfo"] = &fstest.MapFile{Data: []byte(c.meminfo)}
		}
		if c.limit != "" {
			root["sys/fs/cgroup/memory.max"] = &fstest.MapFile{Data: []byte(c.limit)}
		}
		if got, ok := availableMemory(root); ok != c.ok || ok && got != c.want {
			t.Errorf("%s: %d, %v, want %d, %v", name, got, ok, c.want, c.ok)
		}
	}
}

func TestCheckMemory(t *testing.T) {
	if err := checkMemory(1); err != nil {
		t.Error(err)
	}
	if err := checkMemory(math.MaxInt64); !errors.Is(err, errNoMemory) {
		t.Errorf("8 EiB: %v", err)
	}
}

func FuzzMemAvailable(f *testing.F) {
	for _, s := range []string{"MemAvailable: 4096 kB\n", "MemAvailable:", "MemAvailable: 1 MB", "\n\nMemAvailable: 0 kB"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, ok := memAvailable(b); ok && n < 0 {
			t.Errorf("%d bytes", n)
		}
	})
}
