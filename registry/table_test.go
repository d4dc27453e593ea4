package registry

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func TestTableRepeatChangesNothing(t *testing.T) {
	k := newTableKit(0)
	isErr(t, k, "a", nixlkv.ErrNotRegistered)
	k.live(t, "a", "plan 1")
	l := k.acquire(t, "a")
	for range 3 {
		if p, outcome, err := k.Register(peerOf("a")); p != nil || outcome != Unchanged || err != nil {
			t.Fatal(p, outcome, err)
		}
	}
	if l.Err() != nil || l.Plan() != "plan 1" || l.Peer().Agent != "a" || k.Len() != 1 || len(k.dropped) != 0 {
		t.Error(l.Err(), l.Plan(), k.Len(), k.dropped)
	}
	l.Release()
	l.Release()
	if _, i, _ := k.Lookup("a"); i.Rooms != 0 {
		t.Errorf("%d rooms after releasing twice", i.Rooms)
	}
	if len(k.dropped) != 0 {
		t.Error("dropped while live:", k.dropped)
	}
}

func TestTableReplaced(t *testing.T) {
	k := newTableKit(0)
	k.live(t, "a", "plan 1")
	old := k.acquire(t, "a")
	q := peerOf("a")
	q.KV[0].Base, q.Addr = 0x8000, "10.0.0.2:1"
	p, outcome, err := k.Register(q)
	if p == nil || outcome != Replaced || err != nil {
		t.Fatal(p, outcome, err)
	}
	wraps(t, old.Err(), nixlkv.ErrPeerStale, errReplaced)
	isErr(t, k, "a", ErrPreparing)
	if next, err := p.Attach("plan 2"); next != nil || err != nil {
		t.Fatal(next, err)
	}
	now := k.acquire(t, "a")
	if now.Plan() != "plan 2" || now.Peer() != q || now.Generation() <= old.Generation() || old.Plan() != "plan 1" || old.Peer() == q {
		t.Error(now.Plan(), old.Plan(), now.Generation(), old.Generation())
	}
	if _, i, _ := k.Lookup("a"); i.Rooms != 2 {
		t.Errorf("%d rooms", i.Rooms)
	}
	if old.MarkStale(errBroken) {
		t.Error("what an old plan saw made the new one stale")
	}
	old.Release()
	if !slices.Equal(k.dropped, []string{"a plan 1"}) || now.Err() != nil {
		t.Error(k.dropped, now.Err())
	}
	if len(k.ByAddr("10.0.0.1:5000")) != 0 || !slices.Equal(k.ByAddr("10.0.0.2:1"), []string{"a"}) {
		t.Error("the old address is kept, or the new one not")
	}
	now.Release()
}

func TestTableReplacedWhilePreparing(t *testing.T) {
	k := newTableKit(0)
	first, _, err := k.Register(peerOf("a"))
	if err != nil {
		t.Fatal(err)
	}
	q := peerOf("a")
	q.KV[0].Base = 0x8000
	if p, outcome, err := k.Register(q); p != nil || outcome != Replaced || err != nil {
		t.Fatal("a second preparation beside the first", outcome, err)
	}
	next, err := first.Attach("of no use")
	if next == nil || next.Peer() != q || err != nil {
		t.Fatal(next, err)
	}
	isErr(t, k, "a", ErrPreparing)
	if again, err := first.Attach("twice"); again != nil || !errors.Is(err, ErrEnded) {
		t.Error(again, err)
	}
	if first.Fail(errBroken) != nil {
		t.Error("a preparation ended twice")
	}
	if next, err := next.Attach("plan"); next != nil || err != nil {
		t.Fatal(next, err)
	}
	if l := k.acquire(t, "a"); l.Plan() != "plan" {
		t.Error(l.Plan())
	}
	if !slices.Equal(k.dropped, []string{"a of no use"}) {
		t.Error(k.dropped)
	}
}

// A plan that could not be made says nothing of a peer that has registered anew meanwhile.
func TestTableFailWhenReplaced(t *testing.T) {
	k := newTableKit(0)
	first, _, _ := k.Register(peerOf("a"))
	q := peerOf("a")
	q.KV[0].Base = 0x8000
	if _, _, err := k.Register(q); err != nil {
		t.Fatal(err)
	}
	next := first.Fail(errBroken)
	if next == nil || next.Peer() != q || next.Generation() <= first.Generation() {
		t.Fatal(next)
	}
	isErr(t, k, "a", ErrPreparing)
	if _, err := next.Attach("plan"); err != nil || k.acquire(t, "a").Plan() != "plan" {
		t.Error(err)
	}
}

func TestTableFail(t *testing.T) {
	k := newTableKit(0)
	p, _, _ := k.Register(peerOf("a"))
	if next := p.Fail(nixlkv.ErrStride); next != nil {
		t.Fatal(next)
	}
	k.phase(t, "a", Refused)
	isErr(t, k, "a", nixlkv.ErrStride)
	_, err := k.Reload("a")
	wraps(t, err, nixlkv.ErrStride)

	// It may try once more by registering again, not more often than a reload.
	p, outcome, err := k.Register(peerOf("a"))
	if p == nil || outcome != Again || err != nil {
		t.Fatal(p, outcome, err)
	}
	p.Fail(nixlkv.ErrStride)
	k.advance(999 * time.Millisecond)
	if p, outcome, err := k.Register(peerOf("a")); p != nil || outcome != Unchanged || err != nil {
		t.Fatal(p, outcome, err)
	}
	k.advance(time.Millisecond)
	p, outcome, _ = k.Register(peerOf("a"))
	if p == nil || outcome != Again {
		t.Fatal(p, outcome)
	}
	// A failure that may pass leaves the peer stale, to be reloaded.
	p.Fail(fmt.Errorf("%w: no memory", nixlkv.ErrPeerStale))
	k.phase(t, "a", Stale)
	if _, err := k.Acquire("a"); strings.Count(err.Error(), nixlkv.ErrPeerStale.Error()) != 1 {
		t.Error(err)
	}
	k.advance(time.Second)
	if p, err := k.Reload("a"); p == nil || err != nil {
		t.Error(p, err)
	}
}

func TestTableRefuse(t *testing.T) {
	k := newTableKit(0)
	wraps(t, k.Refuse("", "", nixlkv.ErrRegions), nixlkv.ErrMalformed)
	if err := k.Refuse("a", "h:1", nixlkv.ErrRegions); err != nil {
		t.Fatal(err)
	}
	isErr(t, k, "a", nixlkv.ErrRegions)
	if p, i, ok := k.Lookup("a"); p != nil || !ok || i.Phase != Refused || i.Addr != "h:1" || i.Reason == "" {
		t.Errorf("%+v %+v", p, i)
	}
	if p, outcome, err := k.Register(peerOf("a")); p == nil || outcome != Replaced || err != nil {
		t.Fatal(outcome, err)
	} else if _, err := p.Attach("plan"); err != nil {
		t.Fatal(err)
	}
	l := k.acquire(t, "a")
	if err := k.Refuse("a", "h:1", nil); err != nil {
		t.Fatal(err)
	}
	isErr(t, k, "a", errUnnamed)
	wraps(t, l.Err(), nixlkv.ErrPeerStale)
	l.Release()
	if len(k.dropped) != 1 {
		t.Error(k.dropped)
	}
	// A preparation in progress does not bring a refused peer back.
	p, _, _ := k.Register(peerOf("b"))
	if err := k.Refuse("b", "", errBroken); err != nil {
		t.Fatal(err)
	}
	next, err := p.Attach("late")
	if next != nil || !errors.Is(err, errBroken) || len(k.dropped) != 2 {
		t.Error(next, err, k.dropped)
	}
}

func TestTableStaleAndReload(t *testing.T) {
	k := newTableKit(0)
	if _, err := k.Reload("a"); !errors.Is(err, nixlkv.ErrNotRegistered) {
		t.Error(err)
	}
	k.live(t, "a", "plan 1")
	if _, err := k.Reload("a"); !errors.Is(err, ErrNotStale) {
		t.Error(err)
	}
	held := k.acquire(t, "a")
	if !k.MarkStale("a", errBroken) || k.MarkStale("a", nixlkv.ErrAborted) || k.MarkStale("b", errBroken) {
		t.Error("stale once, and only what is known")
	}
	isErr(t, k, "a", nixlkv.ErrPeerStale, errBroken)
	wraps(t, held.Err(), nixlkv.ErrPeerStale, errBroken)

	p, err := k.Reload("a")
	if p == nil || err != nil || p.Peer() != held.Peer() || p.Generation() <= held.Generation() {
		t.Fatal(p, err)
	}
	if _, err := k.Reload("a"); !errors.Is(err, ErrPreparing) {
		t.Error(err)
	}
	p.Fail(errBroken) // leaves it stale
	k.phase(t, "a", Stale)
	_, err = k.Reload("a")
	wraps(t, err, ErrTooSoon, nixlkv.ErrPeerStale)
	k.advance(time.Second)
	if p, err = k.Reload("a"); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Attach("plan 2"); err != nil {
		t.Fatal(err)
	}
	l := k.acquire(t, "a")
	if l.Plan() != "plan 2" || held.Plan() != "plan 1" || len(k.dropped) != 0 {
		t.Error(l.Plan(), held.Plan(), k.dropped)
	}
	held.Release()
	if !slices.Equal(k.dropped, []string{"a plan 1"}) || !errors.Is(k.reasons[0], errBroken) {
		t.Error(k.dropped, k.reasons)
	}
	if !l.MarkStale(nil) || l.MarkStale(nil) {
		t.Error("a plan goes stale once")
	}
	isErr(t, k, "a", nixlkv.ErrPeerStale, errUnnamed)
	l.Release()
	if len(k.dropped) != 2 {
		t.Error(k.dropped)
	}
}

func TestTableStaleWhilePreparing(t *testing.T) {
	k := newTableKit(0)
	first, _, _ := k.Register(peerOf("a"))
	if !k.MarkStale("a", errBroken) {
		t.Error("not stale")
	}
	isErr(t, k, "a", nixlkv.ErrPeerStale)
	// Whoever ends the first preparation gets the reload.
	if p, err := k.Reload("a"); p != nil || !errors.Is(err, ErrPreparing) {
		t.Error(p, err)
	}
	next, err := first.Attach("of a broken connection")
	if next == nil || err != nil || len(k.dropped) != 1 {
		t.Fatal(next, err, k.dropped)
	}
	k.MarkStale("a", errBroken)
	if next, err := next.Attach("again"); next != nil || !errors.Is(err, nixlkv.ErrPeerStale) || len(k.dropped) != 2 {
		t.Error(next, err, k.dropped)
	}
	k.phase(t, "a", Stale)
}

func TestTableSignOfLife(t *testing.T) {
	k := newTableKit(0)
	k.live(t, "a", "plan 1")
	k.MarkStale("a", errBroken)
	q := peerOf("a")
	q.AgentMetadata = []byte("newer")
	p, outcome, err := k.Register(q)
	if p == nil || outcome != Again || err != nil || string(p.Peer().AgentMetadata) != "newer" {
		t.Fatal(p, outcome, err)
	}
}

func TestTableForget(t *testing.T) {
	k := newTableKit(0)
	k.live(t, "a", "plan 1")
	l := k.acquire(t, "a")
	if !k.Forget("a") || k.Forget("a") || k.Len() != 0 || len(k.ByAddr("10.0.0.1:5000")) != 0 {
		t.Error("not forgotten")
	}
	isErr(t, k, "a", nixlkv.ErrNotRegistered)
	wraps(t, l.Err(), nixlkv.ErrPeerStale, errForgotten)
	k.live(t, "a", "plan 2")
	l.Release()
	if !slices.Equal(k.dropped, []string{"a plan 1"}) {
		t.Error(k.dropped)
	}
	if _, i, _ := k.Lookup("a"); i.Rooms != 0 {
		t.Errorf("%d rooms", i.Rooms)
	}
}

func TestTableForgetWhilePreparing(t *testing.T) {
	k := newTableKit(0)
	first, _, _ := k.Register(peerOf("a"))
	if !k.Forget("a") || k.Forget("a") || k.Len() != 0 || len(k.Snapshot()) != 0 || k.MarkStale("a", nil) {
		t.Error("not forgotten")
	}
	if _, _, ok := k.Lookup("a"); ok {
		t.Error("not forgotten")
	}
	// It comes back before the first preparation has ended.
	if p, outcome, err := k.Register(peerOf("a")); p != nil || outcome != Added || err != nil {
		t.Fatal("a second preparation beside the first", outcome, err)
	}
	next, err := first.Attach("old")
	if next == nil || err != nil {
		t.Fatal(next, err)
	}
	k.Forget("a")
	if next := next.Fail(errBroken); next != nil {
		t.Error(next)
	}
	if k.Len() != 0 || len(k.entries) != 0 || len(k.addrs) != 0 {
		t.Error("something is left", k.entries, k.addrs)
	}
}

func TestTableEviction(t *testing.T) {
	k := newTableKit(3)
	for i, agent := range []string{"a", "b", "c"} {
		k.live(t, agent, "plan")
		k.advance(time.Duration(i+1) * time.Second)
	}
	busy := k.acquire(t, "a") // now seen last
	k.advance(time.Second)
	k.live(t, "d", "plan") // in b's place
	if !slices.Equal(k.dropped, []string{"b plan"}) || !errors.Is(k.reasons[0], nixlkv.ErrLimit) {
		t.Error(k.dropped, k.reasons)
	}
	k.advance(time.Second)
	k.MarkStale("d", errBroken) // stale goes before live, though seen later
	k.live(t, "e", "plan")
	if _, _, ok := k.Lookup("d"); ok || k.Len() != 3 {
		t.Error("the stale peer is kept")
	}
	for _, agent := range []string{"c", "e"} {
		defer k.acquire(t, agent).Release()
	}
	if p, _, err := k.Register(peerOf("f")); p != nil || !errors.Is(err, nixlkv.ErrLimit) {
		t.Error(p, err)
	}
	wraps(t, k.Refuse("f", "", errBroken), nixlkv.ErrLimit)
	if p, outcome, err := k.Register(peerOf("a")); p != nil || outcome != Unchanged || err != nil {
		t.Error("a full table refuses a repeat:", p, outcome, err)
	}
	busy.Release()
	if p, _, err := k.Register(peerOf("f")); p == nil || err != nil { // in a's place
		t.Error(p, err)
	}
	// What is being prepared is not evicted either.
	if p, _, err := k.Register(peerOf("g")); p != nil || !errors.Is(err, nixlkv.ErrLimit) {
		t.Error(p, err)
	}
}

func TestTableClose(t *testing.T) {
	k := newTableKit(0)
	k.live(t, "a", "idle")
	k.live(t, "b", "held")
	l := k.acquire(t, "b")
	p, _, _ := k.Register(peerOf("c"))
	k.Close()
	k.Close()
	if !slices.Equal(k.dropped, []string{"a idle"}) {
		t.Error(k.dropped)
	}
	isErr(t, k, "a", nixlkv.ErrClosed)
	isErr(t, k, "c", nixlkv.ErrClosed)
	_, _, err := k.Register(peerOf("a"))
	wraps(t, err, nixlkv.ErrClosed)
	_, err = k.Reload("a")
	wraps(t, err, nixlkv.ErrClosed)
	wraps(t, k.Refuse("a", "", nil), nixlkv.ErrClosed)
	wraps(t, l.Err(), nixlkv.ErrClosed)
	if next, err := p.Attach("late"); next != nil || !errors.Is(err, nixlkv.ErrClosed) {
		t.Error(next, err)
	}
	l.Release()
	if !slices.Equal(k.dropped, []string{"a idle", "c late", "b held"}) || len(k.entries) != 0 {
		t.Error(k.dropped, k.entries)
	}
}

func TestTableBadPeers(t *testing.T) {
	k := newTableKit(0)
	_, _, err := k.Register(nil)
	wraps(t, err, nixlkv.ErrMalformed)
	p := peerOf("a")
	p.KV[0].ItemLen = 0
	_, _, err = k.Register(p)
	wraps(t, err, nixlkv.ErrRegions)
	if k.Len() != 0 {
		t.Error("a bad peer is kept")
	}
}

func TestTableSnapshot(t *testing.T) {
	k := newTableKit(0)
	k.live(t, "b", "plan")
	k.advance(time.Minute)
	defer k.acquire(t, "b").Release()
	q := peerOf("a")
	q.KV[1].Kind, q.Dialect, q.Addr = DRAM, Notifications, "[::1]:9"
	if _, _, err := k.Register(q); err != nil {
		t.Fatal(err)
	}
	if err := k.Refuse("c", "", errBroken); err != nil {
		t.Fatal(err)
	}
	k.advance(time.Second)
	want := []PeerInfo{
		{Agent: "a", Addr: "[::1]:9", Regions: 2, Kinds: "1 VRAM, 1 DRAM", Pages: 3, Phase: Preparing, Generation: 2, Age: time.Second, Idle: time.Second},
		{Agent: "b", Addr: "10.0.0.1:5000", Dialect: Status, Regions: 2, Kinds: "VRAM", Pages: 3, Phase: Live, Rooms: 1, Generation: 1, Age: 61 * time.Second, Idle: time.Second},
		{Agent: "c", Phase: Refused, Reason: "broken pipe", Age: time.Second, Idle: time.Second},
	}
	if got := k.Snapshot(); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := k.ByAddr(""); got != nil {
		t.Error(got)
	}
}

// A drop may call the table: no lock is held.
func TestTableDropCallsTable(t *testing.T) {
	var table *Table[int]
	drops := 0
	table = NewTable(TableConfig[int]{Drop: func(p *Peer, _ int, _ error) {
		drops++
		table.Snapshot()
		table.Forget("other")
	}})
	for _, give := range []func(*Lease[int]){
		func(l *Lease[int]) { l.Release(); table.MarkStale("a", nil) },
		func(l *Lease[int]) { table.Forget("a"); l.Release() },
		func(l *Lease[int]) { l.MarkStale(nil); l.Release() },
		func(l *Lease[int]) { l.Release(); table.Close() },
	} {
		table.Forget("a")
		p, _, err := table.Register(peerOf("a"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Attach(1); err != nil {
			t.Fatal(err)
		}
		l, err := table.Acquire("a")
		if err != nil {
			t.Fatal(err)
		}
		give(l)
	}
	if drops != 4 {
		t.Errorf("%d drops", drops)
	}
}

func TestPhaseNames(t *testing.T) {
	var names []string
	for p := Preparing; p <= gone; p++ {
		names = append(names, p.String())
	}
	for o := Unchanged; o <= Again+1; o++ {
		names = append(names, o.String())
	}
	if s := strings.Join(names, " "); s != "preparing live stale refused Phase(4) unchanged added replaced again Outcome(4)" {
		t.Error(s)
	}
}
