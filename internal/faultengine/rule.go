package faultengine

import (
	"context"
	"fmt"
	"sync"
)

// On says which calls a rule is for.
type On uint8

// The calls that can go wrong.
const (
	// Writes and Reads are transfers when they are posted.
	Writes On = iota
	Reads
	// Loads are loads of a peer's metadata.
	Loads
	// Notifications are those that arrive, one by one, as they are drained.
	Notifications
)

// Do says what becomes of a call.
type Do uint8

// What can become of a transfer.
const (
	// Reject gives the rule's error; nothing is made. It is for loads too.
	Reject Do = iota
	// Break gives the rule's error together with a request that could be made but not posted.
	Break
	// Fail posts nothing, and the status of the request becomes an error when it is asked for.
	Fail
	// Stall posts the request only when it is let go.
	Stall
	// Late posts the request, and tells of its end only when it is let go.
	Late
)

// What can become of a notification.
const (
	// Lose drops it.
	Lose Do = iota + 16
	// Delay delivers it when it is let go.
	Delay
	// Double delivers it twice at once.
	Double
	// Again delivers it, and once more when it is let go.
	Again
)

// Rule says what goes wrong.
type Rule struct {
	On   On
	Do   Do
	Peer string // the peer's agent; "": any
	// Match narrows notifications down to some; nil: all.
	Match func(message string) bool
	Skip  int   // calls that pass before it begins
	Times int   // calls that it takes then; 0: all
	Err   error // for Reject, Break and Fail
}

// Fault is a rule in force.
type Fault struct {
	rule Rule

	mu      sync.Mutex
	seen    int // calls that matched
	taken   int
	held    int
	over    bool          // let go: it takes no more
	changed chan struct{} // closed and replaced when taken changes
}

// take says whether the rule takes a call.
func (f *Fault) take(on On, peer string, message []byte) bool {
	r := &f.rule
	if on != r.On || r.Peer != "" && r.Peer != peer || r.Match != nil && !r.Match(string(message)) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen++
	if f.over || f.seen <= r.Skip || r.Times > 0 && f.taken >= r.Times {
		return false
	}
	f.taken++
	if r.Do == Stall || r.Do == Late || r.Do == Delay || r.Do == Again {
		f.held++
	}
	close(f.changed)
	f.changed = make(chan struct{})
	return true
}

// holds says whether what the rule has taken is still held back; letGo counts one out that was.
func (f *Fault) holds() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.over
}

func (f *Fault) letGo() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held--
}

// Release ends the rule: what it holds back goes on when it is asked for next, and it takes no
// more. It may be called again.
func (f *Fault) Release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
}

// Taken counts the calls that the rule has taken.
func (f *Fault) Taken() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken
}

// Held counts what is held back, including what was let go and not asked for since.
func (f *Fault) Held() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.held
}

// Wait waits until the rule has taken so many calls.
func (f *Fault) Wait(ctx context.Context, n int) error {
	for {
		f.mu.Lock()
		taken, changed := f.taken, f.changed
		f.mu.Unlock()
		if taken >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the fault has happened %d times, want %d: %w", taken, n, ctx.Err())
		}
	}
}
