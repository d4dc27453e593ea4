package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/nixl"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := removePrefill(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		os.Exit(code)
	}))
}

// testShape is that of the prefill which the tests start.
var testShape = shape{layers: 2, pages: 24, pageSize: 4, tokenBytes: 64}

func newTestWorker(t *testing.T, kind nixl.Kind, opts ...kvreceiver.Option) *worker {
	t.Helper()
	engine, err := nixl.Open(kind)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorker(t.Context(), testShape, zaptest.NewLogger(t), append(opts, kvreceiver.WithEngine(engine))...)
	if err != nil {
		t.Fatal(errors.Join(err, engine.Close()))
	}
	w.check = true
	t.Cleanup(func() {
		if err := errors.Join(w.Close(), engine.Close()); err != nil && !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
			t.Error(err)
		}
	})
	return w
}

// eachEngine runs a test over both engines.
func eachEngine(t *testing.T, f func(t *testing.T, kind nixl.Kind)) {
	for _, kind := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(kind.String(), func(t *testing.T) {
			if kind == nixl.Native && os.Getenv("NIXLKV_NIXL_LIB") == "" {
				t.Skip("skip: no NIXL library in NIXLKV_NIXL_LIB; make test fetches one")
			}
			f(t, kind)
		})
	}
}

// post posts JSON, and gives the status and the body.
func post(ctx context.Context, url string, body any) (int, []byte, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return 0, nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(res.Body)
	return res.StatusCode, b.Bytes(), err
}

// tokens gives n tokens.
func tokens(first int32, n int) []int32 {
	ts := make([]int32, n)
	for i := range ts {
		ts[i] = first + int32(i)*7
	}
	return ts
}

// both gives a request to the prefill and the decode, as a router does.
func both(ctx context.Context, p *prefill, decode string, q request) (a answer, err error) {
	var prefillErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		code, body, err := post(ctx, p.prompts, map[string]any{"room": q.Room, "tokens": q.Tokens})
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("prefill: %d %s", code, body)
		}
		prefillErr = err
	})
	q.Bootstrap = p.bootstrap
	code, body, err := post(ctx, decode, q)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("decode: %d %s", code, body)
	}
	wg.Wait()
	if err = errors.Join(err, prefillErr); err != nil {
		return a, err
	}
	return a, json.Unmarshal(body, &a)
}

// examples/prefill serves this worker: several requests at a time, more than one after another
// fit, so that pages are used again.
func TestTogether(t *testing.T) {
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := startPrefill(t, kind)
		w := newTestWorker(t, kind)
		server := httptest.NewServer(w)
		defer server.Close()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()

		var wg sync.WaitGroup
		for line := range 2 { // two requests at a time: 2 × 40 tokens are 20 pages
			wg.Go(func() {
				for i := range 6 {
					room := nixlkv.Room(100*line + i + 1)
					q := request{Room: room, Tokens: tokens(int32(1000*room), []int{40, 1, 4, 39, 37, 5}[i])}
					a, err := both(ctx, p, server.URL+"/decode", q)
					if err != nil {
						t.Errorf("room %d: %v", room, err)
						continue
					}
					want := answer{Room: room, FirstToken: q.Tokens[len(q.Tokens)-1] + 1, Pages: (len(q.Tokens) + 3) / 4, Checked: true, Millis: a.Millis}
					if a != want || a.Millis <= 0 {
						t.Errorf("got %+v, want %+v", a, want)
					}
				}
			})
		}
		wg.Wait()
		w.wantAllFree(t)
	})
}

// wantAllFree wants all pages and slots to be free once they have been waited for.
func (w *worker) wantAllFree(t *testing.T) {
	t.Helper()
	w.releases.Wait()
	if p, s := len(w.pages.free), len(w.free.free); p != w.shape.pages || s != auxSlots {
		t.Errorf("%d of %d pages and %d of %d slots are free", p, w.shape.pages, s, auxSlots)
	}
	slices.Sort(w.pages.free)
	if len(slices.Compact(w.pages.free)) != w.shape.pages {
		t.Errorf("a page is free twice")
	}
}

// published waits until the prefill has been told where a room's pages go: by the second
// message, behind the registration.
func (w *worker) published(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); w.receiver.Stats().Control.MessagesOut < 2; <-tick.C {
		if time.Now().After(end) {
			t.Fatal("nothing was published")
		}
	}
}

// A room that nobody prefills: when the router gives it up, the prefill is told and answers,
// and the pages are free.
func TestGivenUp(t *testing.T) {
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := startPrefill(t, kind)
		w := newTestWorker(t, kind)
		ctx, giveUp := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := w.decode(ctx, request{Room: 9, Bootstrap: p.bootstrap, Tokens: tokens(1, 30)})
			ended <- err
		}()
		w.published(t)
		if n := len(w.pages.free); n != w.shape.pages-8 {
			t.Errorf("%d of %d pages are free", n, w.shape.pages)
		}
		giveUp()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		w.wantAllFree(t)
	})
}

// A prefill that is killed: the room fails at once, and its pages are not used again.
func TestPrefillKilled(t *testing.T) {
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := startPrefill(t, kind)
		w := newTestWorker(t, kind, kvreceiver.WithReleaseTimeout(200*time.Millisecond))
		ended := make(chan error, 1)
		go func() {
			_, err := w.decode(t.Context(), request{Room: 9, Bootstrap: p.bootstrap, Tokens: tokens(1, 30)})
			ended <- err
		}()
		w.published(t)
		p.kill()
		if err := <-ended; !errors.Is(err, nixlkv.ErrPeerLost) {
			t.Errorf("got %v", err)
		}
		w.releases.Wait()
		if n := len(w.pages.free); n != w.shape.pages-8 {
			t.Errorf("%d of %d pages are free; 8 are lost", n, w.shape.pages)
		}
	})
}

// What is not what the prefill was asked for is found.
func TestWrongContents(t *testing.T) {
	p := startPrefill(t, nixl.Embedded)
	w := newTestWorker(t, nixl.Embedded)
	go func() {
		// The answer is not asked for; the room ends all the same.
		_, _, _ = post(t.Context(), p.prompts, map[string]any{"room": 4, "tokens": []int32{1, 2, 3, 4, 6}})
	}()
	_, err := w.decode(t.Context(), request{Room: 4, Bootstrap: p.bootstrap, Tokens: []int32{1, 2, 3, 4, 5}})
	if !errors.Is(err, errContents) || !strings.Contains(err.Error(), "region 0, token 4 at page ") {
		t.Errorf("got %v", err)
	}
	w.wantAllFree(t)
}

func TestHTTP(t *testing.T) {
	w := newTestWorker(t, nixl.Embedded, kvreceiver.WithConnectTimeout(100*time.Millisecond))
	open, err := w.receiver.Open(77, "127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for _, tc := range []struct {
		method, path, body string
		want               int
	}{
		{"GET", "/decode", "", http.StatusNotFound},
		{"POST", "/", "{}", http.StatusNotFound},
		{"POST", "/decode", "{", http.StatusBadRequest},
		{"POST", "/decode", `{"room": -1}`, http.StatusBadRequest},
		{"POST", "/decode", `{"room": 1, "tokens": [5]}`, http.StatusBadRequest},
		{"POST", "/decode", `{"room": 18446744073709551615, "tokens": [5], "bootstrap": "127.0.0.1:1"}`, http.StatusBadRequest},
		{"POST", "/decode", `{"room": 77, "tokens": [5], "bootstrap": "127.0.0.1:1"}`, http.StatusConflict},
		{"POST", "/decode", `{"room": 1, "tokens": [` + strings.Repeat("1,", 96) + `1], "bootstrap": "127.0.0.1:1"}`, http.StatusServiceUnavailable},
		{"POST", "/decode", `{"room": 1, "tokens": [5], "bootstrap": "127.0.0.1:1"}`, http.StatusBadGateway},
	} {
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, httptest.NewRequest(tc.method, tc.path, strings.NewReader(tc.body)))
		if rec.Code != tc.want {
			t.Errorf("%s %s %s: %d %s, want %d", tc.method, tc.path, tc.body, rec.Code, rec.Body, tc.want)
		}
	}
	w.wantAllFree(t)
}
