package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
)

func newTestWorker(t *testing.T) *worker {
	t.Helper()
	boot, err := bootstrap.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	engine, err := nixl.Open(nixl.Embedded)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorker(t.Context(), shape{layers: 2, pages: 16, pageSize: 4, tokenBytes: 64},
		kvsender.WithEngine(engine), kvsender.WithBootstrap(boot.Endpoint().String()), kvsender.WithBootstrapTimeout(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range []func() error{w.Close, engine.Close, boot.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	})
	if top, err := boot.Topology(); err != nil || top.PageSize != 4 {
		t.Errorf("topology %+v, %v", top, err)
	}
	return w
}

func TestNoDecodeComes(t *testing.T) {
	w := newTestWorker(t)
	_, err := w.prefill(t.Context(), prompt{Room: 3, Tokens: []int32{1, 2, 3}})
	if !errors.Is(err, nixlkv.ErrTimeout) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = w.prefill(ctx, prompt{Room: 3}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if len(w.pages.free) != 16 || len(w.free.free) != auxSlots {
		t.Error("pages or slots were not given back")
	}
}

func TestHTTP(t *testing.T) {
	w := newTestWorker(t)
	for _, tc := range []struct {
		method, path, body string
		want               int
	}{
		{"GET", "/prefill", "", http.StatusNotFound},
		{"POST", "/", "{}", http.StatusNotFound},
		{"POST", "/prefill", "{", http.StatusBadRequest},
		{"POST", "/prefill", `{"room": 1, "tokens": [5]}`, http.StatusBadGateway},
	} {
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, httptest.NewRequest(tc.method, tc.path, strings.NewReader(tc.body)))
		if rec.Code != tc.want {
			t.Errorf("%s %s %s: %d %s", tc.method, tc.path, tc.body, rec.Code, rec.Body)
		}
	}
}

func TestCompute(t *testing.T) {
	w := newTestWorker(t)
	next := w.compute([]int32{7, 8, 9, 10, 11}, []int32{3, 1})
	if next != 12 {
		t.Errorf("next token %d", next)
	}
	// Token 11 is row 0 of page 1; the first K region is region 0, the last V region 3.
	s := w.shape
	for region := range 4 {
		at := (region*s.pages + 1) * s.itemLen()
		if b := w.kv.Bytes()[at : at+8]; b[0] != byte(region) || b[4] != 11 {
			t.Errorf("region %d: %v", region, b)
		}
	}
}
