package nixl

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
)

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func TestBadDescriptors(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		s := newSide(t, e, 4096)
		l := must[*List](t)(s.a.NewList(DRAM))
		for _, d := range []Desc{{Addr: 1, Len: 0}, {Addr: math.MaxUint64, Len: 2}, {Addr: 1 << 63, Len: 1<<63 + 1}} {
			wantErr(t, "append", l.Append(s.desc(0, 8), d), ErrBadDescriptor)
		}
		for _, r := range []Run{
			{Addr: 1, Len: 0, Stride: 1, Count: 1},
			{Addr: 1, Len: 1, Stride: 1 << 40, Count: 1 << 40},
			{Addr: math.MaxUint64 - 10, Len: 8, Stride: 8, Count: 2},
			{Addr: 1, Len: 1, Stride: 1, Count: 1 << 31},
			{Addr: 2, Len: math.MaxUint64, Stride: 0, Count: 2},
		} {
			wantErr(t, "append runs", l.AppendRuns(Run{Addr: uint64(s.buf.Addr()), Len: 8, Stride: 8, Count: 1}, r), ErrBadDescriptor)
		}
		if l.Len() != 0 {
			t.Errorf("%d descriptors were added by calls that failed", l.Len())
		}
		_, err := s.a.Prepare(l)
		wantErr(t, "prepare an empty list", err, ErrBadDescriptor)
		check(t, l.AppendRuns(Run{Count: 0}))
		check(t, l.Append())

		for _, r := range []Region{Foreign(DRAM, 0, 8, 0), Foreign(DRAM, 8, 0, 0), Foreign(DRAM, math.MaxUint, 2, 0), Foreign(DRAM, 8, 8, 1),
			HostRange(s.buf, 1, s.buf.Len()), HostRange(s.buf, -1, 1), HostRange(s.buf, math.MaxInt, math.MaxInt), HostRange(s.buf, 0, 0)} {
			_, err := s.a.Register(r)
			wantErr(t, "register", err, ErrBadDescriptor)
		}
		_, err = s.a.Register(Foreign(Mem(5), 8, 8, 0))
		wantErr(t, "register what is of no kind", err, ErrUnsupported)
		_, err = s.a.Register()
		wantErr(t, "register nothing", err, StatusInvalidParam)
		_, err = s.a.NewList(Mem(7))
		wantErr(t, "list of unknown kind", err, ErrUnsupported)
	})
}

func TestUnregisteredMemory(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 8192), newSide(t, e, 8192)
		r := p.load(t, d)
		x := p.a.NewTransfer()
		inP, inD := p.list(t, p.desc(0, 64)), p.list(t, d.desc(0, 64))
		pastP, pastD := p.list(t, p.desc(8192-32, 64)), p.list(t, d.desc(8192-32, 64))
		for what, try := range map[string]func() error{
			"local past its region":  func() error { return x.Create(Write, pastP, r, inD, TransferOptions{Post: true}) },
			"remote past its region": func() error { return x.Create(Write, inP, r, pastD, TransferOptions{Post: true}) },
			"unequal lengths": func() error {
				return x.Create(Write, inP, r, p.list(t, d.desc(0, 65)), TransferOptions{Post: true})
			},
			"prepare local":  func() error { _, err := p.a.Prepare(pastP); return err },
			"prepare remote": func() error { _, err := r.Prepare(pastD); return err },
		} {
			err := try()
			var ne *Error
			if !errors.As(err, &ne) || ne.Agent != p.a.Name() {
				t.Errorf("%s: got %v", what, err)
			}
			if x.Held() {
				t.Errorf("%s: the transfer holds a request", what)
			}
		}
		wantErr(t, "unequal counts", x.Create(Write, p.list(t, p.desc(0, 8), p.desc(8, 8)), r, inD, TransferOptions{}), ErrBadDescriptor)
	})
}

func TestIndexErrors(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		local := must[*Prepared](t)(p.a.Prepare(p.list(t, p.desc(0, 64), p.desc(64, 64))))
		remote := must[*Prepared](t)(r.Prepare(p.list(t, d.desc(0, 64), d.desc(64, 64))))
		x := p.a.NewTransfer()
		for _, ix := range [][2][]int32{{{0}, {2}}, {{-1}, {0}}, {{0, 1}, {0}}, {{}, {}}, {nil, nil}, {{math.MaxInt32}, {0}}} {
			wantErr(t, "create", x.CreateIndexed(Write, local, ix[0], remote, ix[1], TransferOptions{}), ErrBadIndex)
		}
		wantErr(t, "sides mixed up", x.CreateIndexed(Write, remote, []int32{0}, local, []int32{0}, TransferOptions{}), StatusInvalidParam)
		wantErr(t, "agents mixed up", d.a.NewTransfer().CreateIndexed(Write, local, []int32{0}, remote, []int32{0}, TransferOptions{}), ErrForeign)
		check(t, local.Free())
		wantErr(t, "free twice", local.Free(), ErrReleased)
		wantErr(t, "create from a freed list", x.CreateIndexed(Write, local, []int32{0}, remote, []int32{0}, TransferOptions{}), ErrReleased)
	})
}

func TestOrderOfReleases(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		ll, rl := p.list(t, p.desc(0, 64)), p.list(t, d.desc(0, 64))
		local := must[*Prepared](t)(p.a.Prepare(ll))
		remote := must[*Prepared](t)(r.Prepare(rl))
		x := p.a.NewTransfer()
		wantErr(t, "post before create", x.Post(), ErrNotCreated)
		wantErr(t, "release before create", x.Release(), ErrNotCreated)
		check(t, x.CreateIndexed(Write, local, []int32{0}, remote, []int32{0}, TransferOptions{}))
		if _, err := x.Status(); !errors.Is(err, ErrNotPosted) {
			t.Errorf("status before post: %v", err)
		}
		wantErr(t, "create twice", x.CreateIndexed(Write, local, []int32{0}, remote, []int32{0}, TransferOptions{}), ErrCreated)
		wantErr(t, "deregister under a prepared list", p.reg.Deregister(), ErrInUse)
		check(t, local.Free())
		wantErr(t, "deregister under a request", p.reg.Deregister(), ErrInUse)
		wantErr(t, "invalidate under a request", r.Invalidate(), ErrInUse)
		wantErr(t, "free a registered buffer", p.buf.Free(), hostmem.ErrInUse)
		check(t, x.Post())
		wait(t, x)
		check(t, x.Release())
		wantErr(t, "release twice", x.Release(), ErrNotCreated)
		check(t, ll.Free())
		wantErr(t, "free a list twice", ll.Free(), ErrReleased)
		wantErr(t, "append to a freed list", ll.Append(p.desc(0, 8)), ErrReleased)
		check(t, r.Invalidate())
		wantErr(t, "invalidate twice", r.Invalidate(), ErrReleased)
		wantErr(t, "notify after invalidate", r.Notify(nil), ErrReleased)
		check(t, remote.Free())
		check(t, p.reg.Deregister())
		wantErr(t, "deregister twice", p.reg.Deregister(), ErrReleased)
		check(t, p.buf.Free())
	})
}

func TestUseAfterClose(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		ll, rl := p.list(t, p.desc(0, 64)), p.list(t, d.desc(0, 64))
		local := must[*Prepared](t)(p.a.Prepare(ll))
		x := p.a.NewTransfer()
		check(t, x.Create(Write, ll, r, rl, TransferOptions{Post: true}))
		check(t, p.a.Close()) // waits for the transfer
		check(t, p.a.Close()) // again: nothing more to do
		for what, f := range map[string]func() error{
			"post":           x.Post,
			"release":        x.Release,
			"status":         func() error { _, err := x.Status(); return err },
			"create":         func() error { return x.Create(Write, ll, r, rl, TransferOptions{}) },
			"append":         func() error { return ll.Append(p.desc(0, 8)) },
			"free list":      ll.Free,
			"free prepared":  local.Free,
			"notify":         func() error { return r.Notify(nil) },
			"invalidate":     r.Invalidate,
			"deregister":     p.reg.Deregister,
			"register":       func() error { _, err := p.a.Register(Host(p.buf)); return err },
			"metadata":       func() error { _, err := p.a.LocalMetadata(); return err },
			"load":           func() error { _, err := p.a.Load([]byte("x")); return err },
			"notifications":  func() error { return p.a.Notifications(&Notifications{}) },
			"create backend": func() error { _, err := p.a.CreateBackend(DefaultBackend, nil); return err },
			"new list":       func() error { _, err := p.a.NewList(DRAM); return err },
		} {
			wantErr(t, what, f(), ErrClosed)
		}
		if s := p.a.Stats(); s != (AgentStats{}) {
			t.Errorf("left after Close: %+v", s)
		}
		check(t, p.buf.Free())
		check(t, e.Close())
		_, err := e.NewAgent("x")
		wantErr(t, "agent of a closed engine", err, ErrClosed)
	})
}

func TestBadMetadata(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		md := must[[]byte](t)(d.a.LocalMetadata())
		for what, b := range map[string][]byte{
			"none": nil, "text": []byte("hello"), "zeros": make([]byte, 4096), "half": md[:len(md)/2], "one byte": md[:1],
		} {
			if r, err := p.a.Load(b); err == nil {
				t.Errorf("%s: loaded as %q", what, r.Name())
			}
		}
		r := must[*Remote](t)(p.a.Load(md)) // the good one still works
		check(t, r.Check())
		check(t, r.Notify([]byte("x")))
		drained(t, d.a, 1)
	})
}

func TestAgentNames(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		for _, n := range []string{"", "a\x00b", strings.Repeat("n", maxAgentName+1)} {
			_, err := e.NewAgent(n)
			wantErr(t, "name", err, StatusInvalidParam)
		}
		if s := e.Stats(); s.Agents != 0 {
			t.Errorf("%d agents left", s.Agents)
		}
	})
}

func TestHostVRAM(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		plain := newAgent(t, e)
		buf := alloc(t, 4096)
		if _, err := plain.Register(Host(buf).As(VRAM, 0)); err == nil {
			t.Error("host memory was registered as VRAM without asking for it")
		}
		mk := func() *side {
			b := alloc(t, 4096)
			a := newAgent(t, e, WithHostVRAM())
			return &side{a, b, must[*Registration](t)(a.Register(Host(b).As(VRAM, 3)))}
		}
		p, d := mk(), mk()
		r := p.load(t, d)
		fillPattern(p.buf.Bytes(), 6)
		vram := func(s *side) *List {
			l := must[*List](t)(p.a.NewList(VRAM))
			check(t, l.Append(Desc{Addr: uint64(s.buf.Addr()), Len: 4096, Dev: 3}))
			return l
		}
		if l := vram(p); l.Mem() != VRAM {
			t.Errorf("the list's kind is %v", l.Mem())
		}
		x := p.a.NewTransfer()
		check(t, x.Create(Write, vram(p), r, vram(d), TransferOptions{Post: true}))
		wait(t, x)
		if string(d.buf.Bytes()) != string(p.buf.Bytes()) {
			t.Error("wrong bytes")
		}
		check(t, x.Release())
	})
}
