package faultengine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/nixl"
)

var errMade = fmt.Errorf("made up: %w", nixl.StatusBackend)

// Each thing that can become of a transfer is what it says, and the next transfer is untouched.
func TestTransfers(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		a, b := newSide(t, e, "a"), newSide(t, e, "b")
		r, err := a.load(t, b)
		ok(t, err)
		far := a.to(t, b)
		x := a.agent.NewTransfer()
		n := byte(0)
		create := func(t *testing.T, post bool) error {
			n++
			a.buf.Bytes()[0], b.buf.Bytes()[0] = n, 0
			return x.Create(nixl.Write, a.list, r, far, nixl.TransferOptions{Post: post, Notif: []byte{'n'}})
		}
		arrived := func() bool { return b.buf.Bytes()[0] == n }
		again := func(t *testing.T) {
			t.Helper()
			ok(t, create(t, true))
			ok(t, x.Wait(within(t)))
			if !arrived() {
				t.Error("the next transfer did not arrive")
			}
			ok(t, x.Release())
		}
		again(t)
		for _, split := range []bool{false, true} {
			start := func(t *testing.T) error {
				err := create(t, !split)
				if err == nil && split {
					err = x.Post()
				}
				return err
			}
			t.Run(fmt.Sprintf("posted apart=%v", split), func(t *testing.T) {
				t.Run("reject", func(t *testing.T) {
					f := faults.Add(faultengine.Rule{Do: faultengine.Reject, Err: errMade, Times: 1, Skip: 1})
					again(t)
					if err := start(t); !errors.Is(err, errMade) || x.Held() != split || f.Taken() != 1 {
						t.Errorf("%v, held %v, taken %d", err, x.Held(), f.Taken())
					}
					if x.Held() {
						ok(t, x.Release())
					}
					again(t)
				})
				t.Run("break", func(t *testing.T) {
					faults.Add(faultengine.Rule{Do: faultengine.Break, Err: errMade, Times: 1, Peer: b.agent.Name()})
					if err := start(t); !errors.Is(err, errMade) || !x.Held() || arrived() {
						t.Errorf("%v, held %v, arrived %v", err, x.Held(), arrived())
					}
					ok(t, x.Release())
					again(t)
				})
				t.Run("fail", func(t *testing.T) {
					faults.Add(faultengine.Rule{Do: faultengine.Fail, Err: errMade, Times: 1})
					ok(t, start(t))
					if err := x.Wait(within(t)); !errors.Is(err, errMade) || arrived() {
						t.Errorf("%v, arrived %v", err, arrived())
					}
					ok(t, x.Release())
					again(t)
				})
				for do, landed := range map[faultengine.Do]bool{faultengine.Stall: false, faultengine.Late: true} {
					t.Run(fmt.Sprintf("held back, landed=%v", landed), func(t *testing.T) {
						f := faults.Add(faultengine.Rule{Do: do, Times: 1})
						ok(t, start(t))
						if landed {
							eventually(t, "the bytes", arrived)
						}
						ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
						defer cancel()
						if err := x.Wait(ctx); !errors.Is(err, nixl.ErrInProgress) || arrived() != landed || f.Held() != 1 {
							t.Errorf("%v, arrived %v, held %d", err, arrived(), f.Held())
						}
						if err := x.Release(); !errors.Is(err, nixl.ErrInProgress) {
							t.Errorf("released in flight: %v", err)
						}
						f.Release()
						ok(t, x.Wait(within(t)))
						if !arrived() || f.Held() != 0 {
							t.Errorf("arrived %v, held %d", arrived(), f.Held())
						}
						ok(t, x.Release())
						again(t)
					})
				}
			})
		}
	})
}

func TestMetadata(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		a, b := newSide(t, e, "a"), newSide(t, e, "b")
		f := faults.Add(faultengine.Rule{On: faultengine.Loads, Do: faultengine.Reject, Err: errMade, Times: 1})
		if _, err := a.load(t, b); !errors.Is(err, errMade) || f.Taken() != 1 {
			t.Fatalf("%v, taken %d", err, f.Taken())
		}
		r, err := a.load(t, b)
		ok(t, err)
		ok(t, r.Check())
		far := a.to(t, b)
		p, err := r.Prepare(far)
		ok(t, err)
		faults.Vanish(b.agent.Name())
		x := a.agent.NewTransfer()
		near, err := a.agent.Prepare(a.list)
		ok(t, err)
		_, prepErr := r.Prepare(far)
		for call, err := range map[string]error{
			"check": r.Check(), "notify": r.Notify([]byte("x")), "prepare": prepErr,
			"create":  x.Create(nixl.Write, a.list, r, far, nixl.TransferOptions{Post: true}),
			"indexed": x.CreateIndexed(nixl.Write, near, []int32{0}, p, []int32{0}, nixl.TransferOptions{Post: true}),
		} {
			if !errors.Is(err, nixl.StatusNotFound) {
				t.Errorf("%s: %v", call, err)
			}
		}
		ok(t, p.Free())
		r, err = a.load(t, b)
		ok(t, err)
		ok(t, x.Create(nixl.Write, a.list, r, far, nixl.TransferOptions{Post: true}))
		ok(t, x.Wait(within(t)))
	})
}

func TestNotifications(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		a, b := newSide(t, e, "a"), newSide(t, e, "b")
		r, err := a.load(t, b)
		ok(t, err)
		rules := map[string]*faultengine.Fault{}
		for m, do := range map[string]faultengine.Do{"lost": faultengine.Lose, "late": faultengine.Delay, "twice": faultengine.Double, "again": faultengine.Again} {
			rules[m] = faults.Add(faultengine.Rule{On: faultengine.Notifications, Do: do, Peer: a.agent.Name(), Match: func(s string) bool { return s == m }})
		}
		for _, m := range []string{"lost", "late", "twice", "again", "end"} {
			ok(t, r.Notify([]byte(m)))
		}
		var got []string
		eventually(t, "the last one", func() bool { got = b.drain(t, got); return slices.Contains(got, "end") })
		if want := []string{"twice", "twice", "again", "end"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		if got := b.drain(t, nil); len(got) != 0 {
			t.Errorf("%q before it was let go", got)
		}
		for _, f := range rules {
			f.Release()
		}
		got = b.drain(t, nil)
		if want := []string{"late", "again"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}
