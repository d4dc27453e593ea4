package nixl

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Op is the direction of a transfer.
type Op = engine.Op

// The directions: Write pushes local memory to the peer, Read pulls.
const (
	Read  = engine.Read
	Write = engine.Write
)

// TransferOptions refine a transfer. The zero value is a plain transfer.
type TransferOptions struct {
	// Notif is delivered to the peer once the bytes are there. It is copied. nil means none;
	// an empty slice that is not nil is an empty notification.
	Notif []byte
	// NoMerge keeps descriptors apart that are contiguous on both sides.
	NoMerge bool
	// Post posts at once, in the same native call where the build has cgo.
	Post bool
}

type transferState uint8

const (
	transferIdle    transferState = iota // holds no request
	transferCreated                      // never posted
	transferPosted                       // posted and not known to be settled
	transferSettled                      // done or failed
)

// Transfer is a transfer, and a place to make the next one: after Release it can be created
// again, so that a worker that keeps a few of them allocates nothing. It is used by one
// goroutine at a time, except for polling.
type Transfer struct {
	a *Agent

	mu     sync.Mutex // held across the calls that use the request; tried, never waited for
	state  transferState
	req    engine.Request
	status Status
	failed atomic.Pointer[Error] // of a settled transfer; read without mu
	spec   engine.Spec

	// Set while it holds a request; guarded by a.mu.
	remote     *Remote
	span       span // of the local side
	far        span // of the other side, if it is the agent's own too
	prev, next *Transfer
}

// NewTransfer gives a transfer that holds no request yet. It needs no closing, only its
// request needs Release.
func (a *Agent) NewTransfer() *Transfer { return &Transfer{a: a, status: StatusNotPosted} }

// take enters the agent and takes the transfer.
func (t *Transfer) take() error {
	if err := t.a.enter(); err != nil {
		return err
	}
	if !t.mu.TryLock() {
		t.a.leave()
		return fmt.Errorf("%w: the transfer is being used", ErrInUse)
	}
	return nil
}

func (t *Transfer) give() {
	t.mu.Unlock()
	t.a.leave()
}

// Create makes a transfer between descriptors: local[i] and remoteList[i] are of equal
// length. The lists may be used for something else afterwards. With o.Post an error may
// come from the posting, and then the transfer has to be released as well; Held tells.
func (t *Transfer) Create(op Op, local *List, remote *Remote, remoteList *List, o TransferOptions) error {
	if remote == nil {
		return t.a.fail("create transfer", "", fmt.Errorf("%w: nil remote", StatusInvalidParam))
	}
	if err := t.take(); err != nil {
		return t.a.fail("create transfer", remote.name, err)
	}
	defer t.give()
	return t.a.fail("create transfer", remote.name, t.createByList(op, local, remote, remoteList, o))
}

func (t *Transfer) createByList(op Op, local *List, remote *Remote, remoteList *List, o TransferOptions) error {
	switch {
	case local == nil || remoteList == nil:
		return fmt.Errorf("%w: nil list", StatusInvalidParam)
	case local.a != t.a || remote.a != t.a || remoteList.a != t.a:
		return ErrForeign
	case local == remoteList:
		return fmt.Errorf("%w: one list for both sides", StatusInvalidParam)
	}
	if err := local.use(); err != nil {
		return fmt.Errorf("local %w", err)
	}
	defer local.done()
	if err := remoteList.use(); err != nil {
		return fmt.Errorf("remote %w", err)
	}
	defer remoteList.done()
	if local.n != remoteList.n || local.n == 0 {
		return fmt.Errorf("%w: %d local and %d remote descriptors", ErrBadDescriptor, local.n, remoteList.n)
	}
	if local.bytes != remoteList.bytes {
		return fmt.Errorf("%w: %d local and %d remote bytes", ErrBadDescriptor, local.bytes, remoteList.bytes)
	}
	t.spec.LocalList, t.spec.RemoteList, t.spec.Remote = local.raw, remoteList.raw, remote.raw
	return t.create(op, remote, local.span, remoteList.span, o)
}

// CreateIndexed makes a transfer between descriptors of prepared lists: the i-th goes
// between local[localIndex[i]] and remote[remoteIndex[i]], which are of equal length.
// Neighbours that are contiguous on both sides are merged. The indices are copied. With
// o.Post an error may come from the posting, and then the transfer has to be released as
// well; Held tells.
func (t *Transfer) CreateIndexed(op Op, local *Prepared, localIndex []int32, remote *Prepared, remoteIndex []int32, o TransferOptions) error {
	if local == nil || remote == nil {
		return t.a.fail("create transfer", "", fmt.Errorf("%w: nil prepared list", StatusInvalidParam))
	}
	peer := ""
	if remote.remote != nil {
		peer = remote.remote.name
	}
	if err := t.take(); err != nil {
		return t.a.fail("create transfer", peer, err)
	}
	defer t.give()
	return t.a.fail("create transfer", peer, t.createByIndex(op, local, localIndex, remote, remoteIndex, o))
}

func (t *Transfer) createByIndex(op Op, local *Prepared, localIndex []int32, remote *Prepared, remoteIndex []int32, o TransferOptions) error {
	switch {
	case local.a != t.a || remote.a != t.a:
		return ErrForeign
	case local.remote != nil || remote.remote == nil:
		return fmt.Errorf("%w: the sides of the prepared lists are mixed up", StatusInvalidParam)
	case len(localIndex) != len(remoteIndex) || len(localIndex) == 0:
		return fmt.Errorf("%w: %d local and %d remote indices", ErrBadIndex, len(localIndex), len(remoteIndex))
	}
	if err := checkIndex("local", localIndex, local.n); err != nil {
		return err
	}
	if err := checkIndex("remote", remoteIndex, remote.n); err != nil {
		return err
	}
	if !local.p.pin() {
		return fmt.Errorf("local prepared list: %w", ErrReleased)
	}
	defer local.p.unpin()
	if !remote.p.pin() {
		return fmt.Errorf("remote prepared list: %w", ErrReleased)
	}
	defer remote.p.unpin()
	t.spec.LocalPrep, t.spec.LocalIndex = local.raw, localIndex
	t.spec.RemotePrep, t.spec.RemoteIndex = remote.raw, remoteIndex
	return t.create(op, remote.remote, local.span, remote.span, o)
}

func checkIndex(side string, index []int32, n int) error {
	for i, x := range index {
		if x < 0 || int(x) >= n {
			return fmt.Errorf("%w: %s index %d at position %d, the list has %d descriptors", ErrBadIndex, side, x, i, n)
		}
	}
	return nil
}

// create makes the request that t.spec's handles describe. The caller holds t and every
// handle in the spec.
func (t *Transfer) create(op Op, remote *Remote, local, far span, o TransferOptions) error {
	defer func() { t.spec = engine.Spec{} }()
	if t.state != transferIdle {
		return ErrCreated
	}
	if op != Read && op != Write {
		return fmt.Errorf("%w: operation %d", StatusInvalidParam, op)
	}
	a := t.a
	if !remote.p.pin() {
		return ErrReleased
	}
	if err := remote.usable(); err != nil {
		remote.p.unpin()
		return err
	}
	t.spec.Op = op
	t.spec.Notif, t.spec.HasNotif = o.Notif, o.Notif != nil
	t.spec.NoMerge, t.spec.Post = o.NoMerge, o.Post
	// It counts before it exists, so that its memory cannot be deregistered in between; the
	// pin on the peer stays until the request is released.
	if !remote.self {
		far = span{}
	}
	t.remote, t.span, t.far = remote, local, far
	a.mu.Lock()
	err := a.mayCover(local)
	if err == nil {
		err = a.mayCover(far)
	}
	if err == nil {
		a.transfers.add(t)
	}
	a.mu.Unlock()
	if err != nil {
		remote.p.unpin()
		return err
	}
	if o.Post {
		t.flying()
	}
	req, st, err := a.raw.Create(&t.spec)
	if req == 0 {
		if o.Post {
			t.landed(err)
		}
		t.unlink()
		return err
	}
	t.req = req
	t.failed.Store(nil)
	t.status = StatusNotPosted
	if !o.Post {
		t.state = transferCreated
		return nil
	}
	t.state = transferPosted
	if err != nil {
		return t.settle(st, err)
	}
	if st != InProgress {
		return t.settle(st, nil)
	}
	return nil
}

// unlink takes the transfer out of the agent's books.
func (t *Transfer) unlink() {
	t.a.mu.Lock()
	t.a.transfers.remove(t)
	t.a.mu.Unlock()
	t.remote.p.unpin()
	t.state, t.req, t.remote, t.span, t.far = transferIdle, 0, nil, span{}, span{}
	t.status = StatusNotPosted
	t.failed.Store(nil)
}

// flying counts the transfer in before it is posted, landed out when it has settled.
func (t *Transfer) flying() {
	t.a.inFlight.Add(1)
	t.remote.inFlight.Add(1)
}

func (t *Transfer) landed(err error) {
	if errors.Is(err, ErrPeerLost) {
		t.remote.noteLost()
	}
	t.a.inFlight.Add(-1)
	t.remote.settled()
}

// settle records the end of a posting and gives the transfer's error.
func (t *Transfer) settle(st Status, err error) error {
	if t.remote.self {
		err = storageError(st, err)
	} else if err == nil && st < 0 {
		err = st
		if why := t.a.raw.Reason(t.req); errors.Is(why, st) {
			err = why
		} else if why != nil {
			err = fmt.Errorf("%w: %w", st, why)
		}
	}
	t.state, t.status = transferSettled, st
	if err != nil {
		if st >= 0 {
			t.status = StatusBackend
		}
		t.failed.Store(&Error{Call: "transfer", Agent: t.a.name, Peer: t.remote.name, Err: err})
	}
	t.landed(err)
	return err
}

// Post posts a transfer that was created without Post, or again one that has settled. A
// notification given at creation, or by the last PostNotif, is sent again.
func (t *Transfer) Post() error { return t.post(nil, false) }

// PostNotif is Post with another notification in place of the former one; nil is an empty
// one.
func (t *Transfer) PostNotif(notif []byte) error { return t.post(notif, true) }

func (t *Transfer) post(notif []byte, has bool) error {
	if err := t.take(); err != nil {
		return t.a.fail("post", "", err)
	}
	defer t.give()
	switch t.state {
	case transferIdle:
		return t.a.fail("post", "", ErrNotCreated)
	case transferPosted:
		if t.pollOne() == InProgress {
			return t.a.fail("post", t.remote.name, ErrInProgress)
		}
	}
	if err := t.remote.usable(); err != nil {
		return t.a.fail("post", t.remote.name, err)
	}
	t.flying()
	t.state, t.status = transferPosted, InProgress
	t.failed.Store(nil)
	st, err := t.a.raw.Post(t.req, notif, has)
	if err != nil || st != InProgress {
		err = t.settle(st, err)
	}
	return t.a.fail("post", t.remote.name, err)
}

// Release gives the request back, so that the transfer can be created again. It gives
// ErrInProgress while the transfer has not settled: a write may still land, and the memory
// on both sides is not free before.
func (t *Transfer) Release() error {
	if err := t.take(); err != nil {
		return t.a.fail("release", "", err)
	}
	defer t.give()
	if t.state == transferIdle {
		return t.a.fail("release", "", ErrNotCreated)
	}
	peer := t.remote.name
	if t.state == transferPosted && t.pollOne() == InProgress {
		return t.a.fail("release", peer, ErrInProgress)
	}
	return t.a.fail("release", peer, t.end())
}

// end releases a request that is not in flight; the caller holds t.
func (t *Transfer) end() error {
	if err := t.a.raw.Release(t.req); err != nil {
		return err
	}
	t.unlink()
	return nil
}

// Held says whether the transfer holds a request that Release has to give back.
func (t *Transfer) Held() bool {
	if !t.mu.TryLock() {
		return true
	}
	defer t.mu.Unlock()
	return t.state != transferIdle
}

// Telemetry gives what the engine measured of a transfer that has succeeded. The agent must
// have been made WithTelemetry.
func (t *Transfer) Telemetry() (Telemetry, error) {
	var m Telemetry
	err := t.settled("telemetry", func() (err error) {
		m, err = t.a.raw.Telemetry(t.req)
		return err
	})
	return m, err
}

// EstimateCost gives the engine's estimate of the transfer's duration, where it has one.
func (t *Transfer) EstimateCost() (Cost, error) {
	var c Cost
	err := t.holding("estimate cost", func() (err error) {
		c, err = t.a.raw.EstimateCost(t.req)
		return err
	})
	return c, err
}

// Telemetry is what an engine measured of a transfer.
type Telemetry = engine.Telemetry

// Cost is an engine's estimate of a transfer's duration.
type Cost = engine.Cost

// holding runs a native call on the transfer's request.
func (t *Transfer) holding(call string, f func() error) error {
	if err := t.take(); err != nil {
		return t.a.fail(call, "", err)
	}
	defer t.give()
	if t.state == transferIdle {
		return t.a.fail(call, "", ErrNotCreated)
	}
	return t.a.fail(call, t.remote.name, f())
}

// settled is holding for a transfer that must have settled.
func (t *Transfer) settled(call string, f func() error) error {
	return t.holding(call, func() error {
		switch {
		case t.state == transferCreated:
			return ErrNotPosted
		case t.state == transferPosted && t.pollOne() == InProgress:
			return ErrInProgress
		}
		return f()
	})
}

// transferList is the list of transfers that hold a request, linked through themselves so
// that keeping it allocates nothing.
type transferList struct {
	head *Transfer
	n    int
}

func (l *transferList) add(t *Transfer) {
	t.prev, t.next = nil, l.head
	if l.head != nil {
		l.head.prev = t
	}
	l.head = t
	l.n++
}

func (l *transferList) remove(t *Transfer) {
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		l.head = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	}
	t.prev, t.next = nil, nil
	l.n--
}
