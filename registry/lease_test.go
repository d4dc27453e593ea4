package registry

import (
	"context"
	"errors"
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
