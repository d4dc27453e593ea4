package faultengine

import (
	"errors"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// request is what has become of a request of the wrapped engine.
type request struct {
	op   engine.Op
	peer engine.Remote

	fault  *Fault // of the current posting; nil: none
	posted bool   // the wrapped engine has it
	status engine.Status
	err    error // that the wrapped engine gave when it was posted late
}

// statusOf gives the status that an error comes with.
func statusOf(err error) engine.Status {
	var st engine.Status
	if errors.As(err, &st) && st < 0 {
		return st
	}
	return engine.ErrBackend
}

// posts gives what a rule is on that takes posts of a direction.
func posts(op engine.Op) On {
	if op == engine.Read {
		return Reads
	}
	return Writes
}

// Create implements engine.Agent.
func (a *agent) Create(s *engine.Spec) (engine.Request, engine.Status, error) {
	to := s.Remote
	if s.RemotePrep != 0 {
		a.mu.Lock()
		to = a.prepared[s.RemotePrep]
		a.mu.Unlock()
	}
	p := a.peerOf(to)
	if p.gone {
		return 0, engine.ErrNotFound, errGone(p.name)
	}
	var f *Fault
	if s.Post {
		f = a.e.fault(posts(s.Op), p.name, nil)
	}
	if f != nil && f.rule.Do == Reject {
		return 0, statusOf(f.rule.Err), f.rule.Err
	}
	post := s.Post
	s.Post = post && (f == nil || f.rule.Do == Late)
	r, st, err := a.Agent.Create(s)
	s.Post = post
	if r == 0 {
		if f != nil && f.rule.Do != Break && f.rule.Do != Fail {
			f.letGo()
		}
		return r, st, err
	}
	x := &request{op: s.Op, peer: to, fault: f, posted: f == nil || f.rule.Do == Late, status: st}
	a.mu.Lock()
	a.requests[r] = x
	a.mu.Unlock()
	if f == nil {
		return r, st, err
	}
	return x.posting(r, st, err)
}

// posting gives what the posting of a request comes to, whose fault is set.
func (x *request) posting(r engine.Request, st engine.Status, err error) (engine.Request, engine.Status, error) {
	f := x.fault
	switch {
	case f.rule.Do == Break:
		x.fault = nil
		return r, statusOf(f.rule.Err), f.rule.Err
	case err != nil: // the wrapped engine's own
		x.fault = nil
		if f.rule.Do != Fail {
			f.letGo()
		}
		return r, st, err
	}
	return r, engine.InProgress, nil
}

// Post implements engine.Agent.
func (a *agent) Post(r engine.Request, notif []byte, hasNotif bool) (engine.Status, error) {
	a.mu.Lock()
	x := a.requests[r]
	a.mu.Unlock()
	p := a.peerOf(x.peer)
	if p.gone {
		return engine.ErrNotFound, errGone(p.name)
	}
	x.err = nil
	x.fault = a.e.fault(posts(x.op), p.name, nil)
	f := x.fault
	switch {
	case f == nil || f.rule.Do == Late:
		x.posted = true
		st, err := a.Agent.Post(r, notif, hasNotif)
		x.status = st
		if f == nil {
			return st, err
		}
		_, st, err = x.posting(r, st, err)
		return st, err
	case f.rule.Do == Reject:
		x.fault = nil
		return statusOf(f.rule.Err), f.rule.Err
	case hasNotif:
		// The wrapped engine takes a notification only with the post.
		x.fault = nil
		if f.rule.Do == Stall {
			f.letGo()
		}
		return engine.ErrInvalidParam, errStallNotif
	}
	x.posted = false
	_, st, err := x.posting(r, engine.InProgress, nil)
	return st, err
}

var errStallNotif = errors.New("faultengine: a post with another notification cannot be held back")

// Poll implements engine.Agent.
func (a *agent) Poll(reqs []engine.Request, out []engine.Status) {
	var pass []engine.Request
	var at []int
	for i, r := range reqs {
		a.mu.Lock()
		x := a.requests[r]
		a.mu.Unlock()
		if st, decided := a.ask(r, x); decided {
			out[i] = st
			continue
		}
		pass, at = append(pass, r), append(at, i)
	}
	if len(pass) == 0 {
		return
	}
	sts := make([]engine.Status, len(pass))
	a.Agent.Poll(pass, sts)
	for k, i := range at {
		out[i] = sts[k]
	}
}

// ask gives the status of a request that something has become of; decided is false where the
// wrapped engine is to be asked.
func (a *agent) ask(r engine.Request, x *request) (st engine.Status, decided bool) {
	if x == nil {
		return 0, false
	}
	if x.err != nil {
		return statusOf(x.err), true
	}
	f := x.fault
	switch {
	case f == nil:
		return 0, false
	case f.rule.Do == Fail:
		return statusOf(f.rule.Err), true
	case f.holds():
		return engine.InProgress, true
	}
	x.fault = nil
	f.letGo()
	if x.posted {
		if x.status != engine.InProgress { // it had ended when it was posted
			return x.status, true
		}
		return 0, false
	}
	x.posted = true
	st, err := a.Agent.Post(r, nil, false)
	if err != nil {
		x.err = err
		return statusOf(err), true
	}
	return st, true
}

// Reason implements engine.Agent.
func (a *agent) Reason(r engine.Request) error {
	a.mu.Lock()
	x := a.requests[r]
	a.mu.Unlock()
	switch {
	case x != nil && x.err != nil:
		return x.err
	case x != nil && x.fault != nil && x.fault.rule.Do == Fail:
		return x.fault.rule.Err
	}
	return a.Agent.Reason(r)
}

// Release implements engine.Agent.
func (a *agent) Release(r engine.Request) error {
	err := a.Agent.Release(r)
	if err == nil {
		a.mu.Lock()
		delete(a.requests, r)
		a.mu.Unlock()
	}
	return err
}
