package bootstrap

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nixlkv/nixlkv"
)

// schedule says how often and how long apart a request is repeated.
type schedule struct {
	tries       int // 0: as long as the context lives
	first, most time.Duration
}

var (
	// registering is SGLang's: 5 tries, 1, 2, 4, 8 s apart (CommonKVManager.register_to_bootstrap).
	registering = schedule{tries: 5, first: time.Second, most: 30 * time.Second}
	// asking starts quicker than SGLang's once a second, and slows down to it: the prefill is
	// either about to be ready, or far from it.
	asking = schedule{first: 50 * time.Millisecond, most: time.Second}
)

// delay is the pause after a try, counted from 0: doubled every time, times 0.75 to 1 so that
// ranks that started together do not stay together.
func (s schedule) delay(try int) time.Duration {
	d := s.most
	if try < 32 {
		d = min(s.first<<try, s.most)
	}
	return time.Duration(float64(d) * (0.75 + 0.25*rand.Float64()))
}

// do repeats one until it succeeds, fails for good, or the tries or the context are used up.
// The error then wraps that of the last try that was not cut short by ctx, and ctx's own.
func (s schedule) do(ctx context.Context, one func(context.Context) error) error {
	var last error
	for try := 0; ; try++ {
		if err := ctx.Err(); err != nil {
			return gaveUp(try, err, last)
		}
		err := one(ctx)
		if err == nil {
			return nil
		}
		if cut := ctx.Err(); cut != nil {
			if last == nil {
				last = err
			}
			return gaveUp(try+1, cut, last)
		}
		if !transient(err) {
			return err
		}
		last = err
		if try+1 == s.tries {
			return fmt.Errorf("gave up after %d tries: %w", try+1, last)
		}
		t := time.NewTimer(s.delay(try))
		select {
		case <-ctx.Done():
			t.Stop()
		case <-t.C:
		}
	}
}

func gaveUp(tries int, why, last error) error {
	if last == nil {
		return fmt.Errorf("%w, not asked", why)
	}
	return fmt.Errorf("gave up after %d tries (%w): %w", tries, why, last)
}

// transient tells whether it may help to ask again: the server is not there yet, not ready,
// or in trouble; but not if it was understood and refused.
func transient(err error) bool {
	var status *StatusError
	if errors.As(err, &status) {
		return status.transient()
	}
	var untrusted *tls.CertificateVerificationError
	if errors.As(err, &untrusted) {
		return false
	}
	return errors.Is(err, nixlkv.ErrPeerLost) || errors.Is(err, nixlkv.ErrTimeout)
}
