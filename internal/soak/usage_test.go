package main

import (
	"os"
	"runtime"
	"testing"
)

func TestOwnUsage(t *testing.T) {
	before, err := ownUsage()
	if err != nil {
		t.Fatal(err)
	}
	if before.resident < 1<<20 || before.threads < 1 || before.files < 3 || before.goroutines < 1 {
		t.Errorf("%+v", before)
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { <-ended }()
	after, err := ownUsage()
	if err != nil {
		t.Fatal(err)
	}
	if more := after.exceeding(before); len(more) != 2 {
		t.Errorf("%v with a goroutine and a file more: %+v, were %+v", more, after, before)
	}
	close(ended)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if more := before.exceeding(after); len(more) != 0 {
		t.Errorf("%v", more)
	}
	runtime.Gosched()
}

func TestParseStatus(t *testing.T) {
	resident, threads, err := parseStatus([]byte("Name:\tsoak\nVmRSS:\t  2048 kB\nThreads:\t7\n"))
	if resident != 2<<20 || threads != 7 || err != nil {
		t.Errorf("%d, %d, %v", resident, threads, err)
	}
	for _, s := range []string{"", "VmRSS: 5 kB\n", "Threads: 5\n", "VmRSS: x kB\nThreads: 5\n", "VmRSS: 5 kB\nThreads: -5\n", "VmRSS: 99999999999999999999 kB\nThreads: 1\n"} {
		if r, n, err := parseStatus([]byte(s)); err == nil {
			t.Errorf("%q: %d, %d", s, r, n)
		}
	}
}

func FuzzParseStatus(f *testing.F) {
	f.Add([]byte("VmRSS:\t2048 kB\nThreads:\t7\n"))
	f.Add([]byte("VmRSS:\t-1 kB\nThreads:\t0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, n, err := parseStatus(b); err == nil && (r <= 0 || n <= 0) {
			t.Errorf("%d, %d", r, n)
		}
	})
}
