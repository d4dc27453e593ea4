package embedded

import (
	"bytes"
	"math"
	"net"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// streamPair gives two connected ends.
func streamPair(t testing.TB) (x, y *connection) {
	t.Helper()
	l, err := listenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []net.Conn{c, d} {
		conn, err := newConnection(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if i == 0 {
			x = conn
		} else {
			y = conn
		}
	}
	return x, y
}

// placesKit is an agent with two regions that lie inside of its memory; a page of the
// second one cannot be accessed.
type placesKit struct {
	a    *Agent
	mem  [2]*memory
	from [2]uint64 // of the regions in their memory
	n    [2]uint64
	hole uint64 // offset in the second region
}

const kitPage = 4096

func newPlacesKit(t *testing.T) *placesKit {
	k := &placesKit{from: [2]uint64{100, kitPage}, n: [2]uint64{3*kitPage - 50, 4 * kitPage}, hole: 2 * kitPage}
	for i := range k.mem {
		k.mem[i] = foreign(t, 6*kitPage)
	}
	k.a = newTestAgent(t, "a", engine.AgentConfig{})
	for i, m := range k.mem {
		if err := k.a.Register(engine.DRAM, []engine.Region{{Addr: m.addr() + k.from[i], Len: k.n[i], FD: -1}}); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// protect takes the hole away, or gives it back.
func (k *placesKit) protect(t rapid.TB, prot int) {
	at := k.from[1] + k.hole
	if err := unix.Mprotect(k.mem[1].data[at:at+kitPage], prot); err != nil {
		t.Fatal(err)
	}
}

// bytesOf gives the memory of a part, or nil if it is not in bounds.
func (k *placesKit) bytesOf(p part) []byte {
	i := p.region - 1
	if i > 1 || p.off > k.n[i] || p.n > k.n[i]-p.off {
		return nil
	}
	return k.mem[i].data[k.from[i]+p.off:][:p.n:p.n]
}

func (k *placesKit) inHole(p part) bool {
	return p.region == 2 && p.n > 0 && p.off < k.hole+kitPage && p.off+p.n > k.hole
}

// drawParts draws a table, with a part that is wrong now and then.
func (k *placesKit) drawParts(t *rapid.T) []part {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) part {
		p := part{region: rapid.Uint64Range(1, 2).Draw(t, "region")}
		size := k.n[p.region-1]
		p.off = rapid.Uint64Range(0, size).Draw(t, "off")
		p.n = rapid.Uint64Range(0, min(size-p.off, 2*kitPage)).Draw(t, "n")
		switch rapid.IntRange(0, 40).Draw(t, "wrong") {
		case 1:
			p.region = rapid.SampledFrom([]uint64{0, 3, math.MaxUint64}).Draw(t, "no region")
		case 2:
			p.off = size - p.n + 1
		case 3:
			p.off = math.MaxUint64 - p.n
		}
		return p
	}), 1, 40).Draw(t, "parts")
}

func encodeParts(ps []part) (table parts, sum uint64) {
	for _, p := range ps {
		table = appendPart(table, p)
		sum += p.n
	}
	return table, sum
}

// want says which parts are moved: those before the first that is wrong, and how that is
// answered.
func (k *placesKit) want(ps []part) (good int, outcome result) {
	for i, p := range ps {
		if k.bytesOf(p) == nil {
			return i, result{codeNotRegistered, p}
		}
		if k.inHole(p) {
			return i, result{codeFault, p}
		}
	}
	return len(ps), result{}
}

// TestReceiveIntoParts sends bytes to parts of registered memory, in pieces of any size,
// some of them read ahead. The parts before the first wrong one get theirs; but for that
// one, nothing else changes, and the frame that follows is found.
func TestReceiveIntoParts(t *testing.T) {
	k := newPlacesKit(t)
	x, y := streamPair(t)
	frames := newFrameReader(y, y)
	to := partPlaces{a: k.a}
	k.protect(t, unix.PROT_NONE)
	defer k.protect(t, unix.PROT_READ|unix.PROT_WRITE)
	rapid.Check(t, func(t *rapid.T) {
		k.protect(t, unix.PROT_READ|unix.PROT_WRITE)
		var was [2][]byte
		for i, m := range k.mem {
			fill(m.data, uint64(i))
			was[i] = bytes.Clone(m.data)
		}
		ps := k.drawParts(t)
		table, sum := encodeParts(ps)
		payload := make([]byte, sum)
		fill(payload, rapid.Uint64().Draw(t, "seed"))
		good, outcome := k.want(ps)
		k.protect(t, unix.PROT_NONE)

		// Enough to be read ahead, or not.
		ahead := rapid.IntRange(0, int(min(sum, readBuffer))).Draw(t, "ahead")
		cuts := rapid.SliceOfN(rapid.IntRange(0, int(sum)-ahead), 0, 5).Draw(t, "cuts")
		next := appendHeader(nil, frameUnmapped, 0, 77, 0)
		sent := make(chan error, 1)
		head := appendHeader(nil, frameData, 0, 1, int(sum))
		if _, err := x.Write(append(head, payload[:ahead]...)); err != nil {
			t.Fatal(err)
		}
		if h, _, err := frames.next(); err != nil || h.typ != frameData {
			t.Fatal(h, err)
		}
		go func() {
			rest := payload[ahead:]
			for _, c := range cuts {
				c = min(c, len(rest))
				if _, err := x.Write(rest[:c]); err != nil {
					sent <- err
					return
				}
				rest = rest[c:]
			}
			_, err := x.Write(append(rest[:len(rest):len(rest)], next...))
			sent <- err
		}()
		to.start(table)
		if err := frames.receive(&to); err != nil {
			t.Fatal(err)
		}
		if got := to.finish(); got != outcome {
			t.Fatalf("outcome %+v, want %+v", got, outcome)
		}
		if len(to.held) != 0 {
			t.Fatal("regions are still held")
		}
		if h, _, err := frames.next(); err != nil || h.number != 77 {
			t.Fatal(h, err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}

		k.protect(t, unix.PROT_READ|unix.PROT_WRITE)
		var got [2][]byte
		for i, m := range k.mem {
			got[i] = bytes.Clone(m.data)
			copy(m.data, was[i])
		}
		rest := payload
		for _, p := range ps[:good] {
			copy(k.bytesOf(p), rest)
			rest = rest[p.n:]
		}
		if outcome.code == codeFault { // what it got of it, nobody says
			p := ps[good]
			i := p.region - 1
			copy(k.bytesOf(p), got[i][k.from[i]+p.off:][:p.n])
		}
		for i, m := range k.mem {
			if !bytes.Equal(m.data, got[i]) {
				t.Fatalf("memory %d has other bytes than it should", i)
			}
		}
	})
}

// TestSendFromParts is the way back: the bytes of the parts, and zeros from the first wrong
// one on, as many as were promised.
func TestSendFromParts(t *testing.T) {
	k := newPlacesKit(t)
	x, y := streamPair(t)
	w, frames := newFrameWriter(x), newFrameReader(y, y)
	from := partPlaces{a: k.a}
	for i, m := range k.mem {
		fill(m.data, uint64(i))
	}
	was := [2][]byte{bytes.Clone(k.mem[0].data), bytes.Clone(k.mem[1].data)}
	k.protect(t, unix.PROT_NONE)
	defer k.protect(t, unix.PROT_READ|unix.PROT_WRITE)
	rapid.Check(t, func(t *rapid.T) {
		ps := k.drawParts(t)
		table, sum := encodeParts(ps)
		good, outcome := k.want(ps)
		sent := make(chan error, 1)
		go func() {
			from.start(table)
			w.buf = appendHeader(w.buf, frameData, 0, 5, int(sum))
			if err := w.payload(&from, sum); err != nil {
				sent <- err
				return
			}
			w.buf = appendHeader(w.buf, frameUnmap, 0, 78, 0)
			sent <- w.flush()
		}()
		h, _, err := frames.next()
		if err != nil || h.typ != frameData {
			t.Fatal(h, err)
		}
		got, err := payload(frames)
		if err != nil {
			t.Fatal(err)
		}
		if h, _, err := frames.next(); err != nil || h.number != 78 {
			t.Fatal(h, err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		// What is wrong behind the last byte is found by finish.
		if o := from.finish(); o != outcome {
			t.Fatalf("outcome %+v, want %+v", o, outcome)
		}
		for i, p := range ps {
			want := make([]byte, p.n)
			switch {
			case i < good:
				at := k.from[p.region-1] + p.off
				copy(want, was[p.region-1][at:])
			case i == good && outcome.code == codeFault:
				want = got[:p.n] // some of it may have gone out
			}
			if !bytes.Equal(got[:p.n], want) {
				t.Fatalf("part %d has other bytes", i)
			}
			got = got[p.n:]
		}
	})
}
