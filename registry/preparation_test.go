package registry

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nixlkv/nixlkv"
)

func TestTableAcquireWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newTableKit(0)
		if _, err := k.AcquireWait(t.Context(), "a"); !errors.Is(err, nixlkv.ErrNotRegistered) {
			t.Error(err)
		}
		p, _, _ := k.Register(peerOf("a"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := k.AcquireWait(ctx, "a"); !errors.Is(err, ErrPreparing) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		got := make(chan string)
		for range 3 {
			go func() {
				l, err := k.AcquireWait(t.Context(), "a")
				if err != nil {
					got <- err.Error()
					return
				}
				defer l.Release()
				got <- l.Plan()
			}()
		}
		synctest.Wait()
		// Replaced meanwhile: they go on waiting, for the newer plan.
		q := peerOf("a")
		q.GPU++
		if _, _, err := k.Register(q); err != nil {
			t.Fatal(err)
		}
		next, err := p.Attach("old")
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case s := <-got:
			t.Fatal("somebody did not wait:", s)
		default:
		}
		if _, err := next.Attach("new"); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if s := <-got; s != "new" {
				t.Error(s)
			}
		}
		synctest.Wait()

		// They learn of a failure too.
		p, _, _ = k.Register(peerOf("b"))
		go func() {
			_, err := k.AcquireWait(t.Context(), "b")
			got <- err.Error()
		}()
		synctest.Wait()
		p.Fail(nixlkv.ErrStride)
		if s := <-got; !strings.Contains(s, nixlkv.ErrStride.Error()) {
			t.Error(s)
		}
	})
}

func TestPreparationRun(t *testing.T) {
	k := newTableKit(0)
	p, _, _ := k.Register(peerOf("a"))
	var bases []uint64
	err := p.Run(func(peer *Peer) (string, error) {
		bases = append(bases, peer.KV[0].Base)
		if len(bases) == 1 { // it registers anew meanwhile
			q := peerOf("a")
			q.KV[0].Base = 0x8000
			if _, _, err := k.Register(q); err != nil {
				t.Fatal(err)
			}
			return "", errBroken
		}
		return "plan", nil
	})
	if err != nil || !slices.Equal(bases, []uint64{0x1000, 0x8000}) || k.acquire(t, "a").Plan() != "plan" {
		t.Errorf("%v, %#x", err, bases)
	}

	p, _, _ = k.Register(peerOf("b"))
	err = p.Run(func(*Peer) (string, error) { return "", nixlkv.ErrTopology })
	wraps(t, err, nixlkv.ErrTopology)
	isErr(t, k, "b", nixlkv.ErrTopology)

	p, _, _ = k.Register(peerOf("c"))
	func() {
		defer func() {
			if r := recover(); r != "boom" {
				t.Error(r)
			}
		}()
		err := p.Run(func(*Peer) (string, error) {
			k.MarkStale("c", errBroken)
			if _, err := k.Reload("c"); !errors.Is(err, ErrPreparing) {
				t.Error(err)
			}
			panic("boom")
		})
		t.Error("came back with", err)
	}()
	isErr(t, k, "c", errPanicked)
}
