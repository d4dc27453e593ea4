package embedded

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func frame(typ frameType, flags uint8, number uint64, body []byte) []byte {
	return append(appendHeader(nil, typ, flags, number, len(body)), body...)
}

// partsBody is the body of a write or read that says count parts and has these.
func partsBody(count uint32, payload int, ps ...part) []byte {
	b := binary.LittleEndian.AppendUint32(nil, count)
	for _, p := range ps {
		b = appendPart(b, p)
	}
	return append(b, make([]byte, payload)...)
}

// TestHostileInitiator: who breaks the protocol loses its connection, and nobody else
// notices.
func TestHostileInitiator(t *testing.T) { overEach(t, transports, testHostileInitiator) }

func testHostileInitiator(t *testing.T, kind wayKind) {
	p := newPair(t, kind, 64<<10)
	b := p.b
	region := b.region(1).id
	good := part{region, 0, 8}
	hi := hello{to: b.id, name: "raw"}.append(nil)
	unnamed := hello{to: b.id}.append(nil)
	header := func(length uint32, typ, flags, reserved byte) []byte {
		h := binary.LittleEndian.AppendUint32(nil, length)
		return append(h, typ, flags, reserved, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	full := frame(frameCommit, flagNotification, 1, make([]byte, MaxNotification))
	cases := []struct {
		name string
		send [][]byte
	}{
		{"garbage", [][]byte{[]byte(strings.Repeat("GET / HTTP/1.1\r\n", 20))}},
		{"no hello", [][]byte{frame(frameMap, 0, 1, nil)}},
		{"hello without a name", [][]byte{unnamed}},
		{"hello too long", [][]byte{header(1<<20, byte(frameHello), 0, 0)}},
		{"two hellos", [][]byte{hi, hi}},
		{"type of a target", [][]byte{hi, frame(frameDone, 0, 1, make([]byte, 4+partSize))}},
		{"no type", [][]byte{hi, header(0, 0, 0, 0)}},
		{"high type", [][]byte{hi, header(0, 255, 0, 0)}},
		{"reserved bits", [][]byte{hi, header(0, byte(frameMap), 0, 1)}},
		{"flags", [][]byte{hi, header(0, byte(frameMap), 1, 0)}},
		{"flags of commit", [][]byte{hi, header(0, byte(frameCommit), 2, 0)}},
		{"absurd length", [][]byte{hi, header(math.MaxUint32, byte(frameWrite), 0, 0)}},
		{"map with a body", [][]byte{hi, header(1, byte(frameMap), 0, 0)}},
		{"write of nothing", [][]byte{hi, frame(frameWrite, 0, 1, nil)}},
		{"write of no parts", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(0, 8))}},
		{"write of absurd parts", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(math.MaxUint32, 8, good))}},
		{"write of too few parts", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(2, 0, good))}},
		{"write of too few bytes", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(1, 7, good))}},
		{"write of too many bytes", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(1, 9, good))}},
		{"write whose sum wraps", [][]byte{hi, frame(frameWrite, 0, 1, partsBody(2, 7, part{region, 0, 8}, part{region, 0, math.MaxUint64}))}},
		{"read of too much", [][]byte{hi, frame(frameRead, 0, 1, partsBody(1, 0, part{region, 0, maxRead + 1}))}},
		{"read with bytes behind", [][]byte{hi, frame(frameRead, 0, 1, partsBody(1, 1, good))}},
		{"commit with stray bytes", [][]byte{hi, frame(frameCommit, 0, 1, []byte("x"))}},
		{"map twice", [][]byte{hi, frame(frameMap, 0, region, nil), frame(frameMap, 0, region, nil)}},
	}
	check := transfer(t, p.a, p.spec(t, engine.Write, 4096))
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			before := b.Stats().Dropped
			raw := dialRaw(t, b)
			for _, msg := range c.send {
				raw.send(msg)
			}
			raw.wantClosed()
			eventually(t, "counting", func() bool { return b.Stats().Dropped == before+1 })
			fill(p.local.data, uint64(i))
			if _, err := p.a.Post(check, []byte("x"), true); err != nil {
				t.Fatal(err)
			}
			mustSucceed(t, p.a, check)
			wantBytes(t, p.peer.data, p.local.data)
			notes(t, b, 1)
		})
	}
	t.Run("more notifications than the window", func(t *testing.T) {
		raw := greet(t, b)
		go raw.drain()
		before := b.Stats().Dropped
		for range 64<<20/MaxNotification + 4 {
			raw.send(full)
		}
		eventually(t, "counting", func() bool { return b.Stats().Dropped == before+1 })
		var buf engine.Notifications
		if err := b.Notifications(&buf); err != nil {
			t.Fatal(err)
		}
		if n := len(buf.Records); n > 64<<20 {
			t.Fatalf("%d bytes of notifications were kept", n)
		}
	})
	t.Run("two reads at once", func(t *testing.T) {
		// The second comes while the first cannot be finished, because nobody reads.
		raw := greet(t, b)
		big := part{region, 0, 64 << 10}
		var ps []part
		for range maxRead / (64 << 10) {
			ps = append(ps, big)
		}
		before := b.Stats().Dropped
		read := frame(frameRead, 0, 1, partsBody(uint32(len(ps)), 0, ps...))
		raw.send(append(read, read...))
		eventually(t, "counting", func() bool { return b.Stats().Dropped == before+1 })
	})
	// What holds no memory any more can be deregistered.
	if err := b.Deregister(engine.DRAM, []engine.Region{p.peer.region()}); err != nil {
		t.Fatal(err)
	}
}

// TestRefused: who means another agent, or speaks another version, is told so, and that is
// why it fails.
func TestRefused(t *testing.T) { overEach(t, transports, testRefused) }

func testRefused(t *testing.T, kind wayKind) {
	b := kind.agent(t, "b", engine.AgentConfig{})
	newer := hello{to: b.id, name: "raw"}.append(nil)
	newer[headerSize+len(helloMagic)]++
	cases := []struct {
		name  string
		hello []byte
		want  error
	}{
		{"version", newer, errVersion},
		{"agent", hello{to: agentID{9}, name: "raw"}.append(nil), errNotHere},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			before := b.Stats()
			raw := dialRaw(t, b)
			raw.send(c.hello)
			_, body := raw.wantFrame(frameRefused)
			raw.wantClosed()
			r, err := parseRefusal(body)
			wantErr(t, err, c.want)
			if r.version != protocolVersion {
				t.Fatalf("refused by version %d", r.version)
			}
			eventually(t, "counting", func() bool { return b.Stats().Refused == before.Refused+1 })
			if after := b.Stats(); after.Dropped != before.Dropped {
				t.Fatalf("stats %+v, were %+v", after, before)
			}

			// The initiator's side of it.
			a := kind.agent(t, "a", engine.AgentConfig{})
			f := kind.fakeTarget(t, 4096)
			remote := loadBytes(t, a, f.encode())
			told := make(chan error, 1)
			go func() { told <- a.Connect(remote) }()
			f.accept(t).send(append(appendHeader(nil, frameRefused, 0, 0, refusalSize), body...))
			wantErr(t, <-told, engine.ErrPeerLost, c.want)
		})
	}
}

// TestBounds: reads and writes outside of what is registered are answered, not done.
func TestBounds(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			// The region is the middle third; around it is memory that must not change.
			const third = 4096
			mem := kind.get(t, 3*third)
			b := kind.agent(t, "b", engine.AgentConfig{})
			reg := engine.Region{Addr: mem.addr() + third, Len: third, FD: mem.fd, Off: third}
			if err := b.Register(engine.DRAM, []engine.Region{reg}); err != nil {
				t.Fatal(err)
			}
			id := b.region(1).id
			raw := greet(t, b)
			cases := []part{
				{id, third, 1},
				{id, third - 1, 2},
				{id, math.MaxUint64, 1},
				{id, math.MaxUint64 - third + 1, third},
				{id, 1 << 63, 8},
				{id + 1, 0, 8},
				{0, 0, 8},
			}
			for i, pt := range cases {
				number := uint64(i + 1)
				ones := append(partsBody(2, 0, part{id, 0, 0}, pt), []byte(strings.Repeat("\x01", int(pt.n)))...)
				raw.send(frame(frameWrite, 0, number, ones))
				raw.send(frame(frameCommit, flagNotification, number, []byte("no")))
				h, body := raw.wantFrame(frameDone)
				if res, err := parseResult(body); err != nil || h.number != number || res != (result{codeNotRegistered, pt}) {
					t.Fatalf("%v: answer %+v, %v", pt, res, err)
				}
				raw.send(frame(frameRead, 0, number, partsBody(1, 0, pt)))
				_, body = raw.wantFrame(frameReadDone)
				if res, err := parseResult(body); err != nil || res != (result{codeNotRegistered, pt}) {
					t.Fatalf("%v: answer %+v, %v", pt, res, err)
				}
			}
			if !raw.conn.overTCP() {
				raw.send(frame(frameMap, 0, 99, nil))
				_, body := raw.wantFrame(frameRegion)
				if answer, err := parseRegion(body); err != nil || answer.code != codeNotRegistered {
					t.Fatalf("answer %+v, %v", answer, err)
				}
			}
			raw.send(frame(frameUnmapped, 0, 99, nil))
			for i, v := range mem.data {
				if v != 0 {
					t.Fatalf("byte %d was written", i)
				}
			}
			notes(t, b, 0)
			// A transfer left without a commit does not count against the next.
			raw.send(frame(frameWrite, 0, 100, partsBody(1, 1, part{id, third, 1})))
			raw.send(frame(frameCommit, flagNotification, 101, []byte("yes")))
			if _, body := raw.wantFrame(frameDone); binary.LittleEndian.Uint32(body) != uint32(codeOK) {
				t.Fatalf("answer % x", body)
			}
			if got := notes(t, b, 1); got[0] != (note{"raw", "yes"}) {
				t.Fatalf("notification %q", got)
			}
			if dropped := b.Stats().Dropped; dropped != 0 {
				t.Fatalf("%d connections dropped", dropped)
			}
		})
	}
}

// TestHostileTarget: an initiator leaves a target that breaks the protocol.
func TestHostileTarget(t *testing.T) { overEach(t, transports, testHostileTarget) }

func testHostileTarget(t *testing.T, kind wayKind) {
	const size = 64 << 10
	welcome := appendWelcome(nil, agentID{1})
	done := appendResult(nil, frameDone, 9, result{})
	cases := []struct {
		name string
		op   engine.Op
		// foreign: the request goes through the connection.
		foreign bool
		act     func(c *rawConn)
	}{
		{"garbage", engine.Write, false, func(c *rawConn) { c.send([]byte(strings.Repeat("x", 100))) }},
		{"another agent", engine.Write, false, func(c *rawConn) { c.send(appendWelcome(nil, agentID{2})) }},
		{"two welcomes", engine.Write, false, func(c *rawConn) { c.send(append(welcome, welcome...)) }},
		{"done of nothing", engine.Write, false, func(c *rawConn) { c.send(append(welcome, done...)) }},
		{"region not asked for", engine.Write, false, func(c *rawConn) {
			c.send(regionAnswer{code: codeNotRegistered}.append(welcome, 77))
		}},
		{"region with a bad offset", engine.Write, false, func(c *rawConn) {
			c.send(regionAnswer{code: codeOK, grant: 1, off: -1}.append(welcome, 5))
		}},
		{"data not asked for", engine.Write, false, func(c *rawConn) { c.send(append(welcome, frame(frameData, 0, 1, []byte("x"))...)) }},
		{"end of no read", engine.Write, false, func(c *rawConn) {
			c.send(appendResult(welcome, frameReadDone, 1, result{}))
		}},
		{"unknown code", engine.Write, true, func(c *rawConn) {
			c.send(welcome)
			h, _ := c.wantFrame(frameWrite)
			c.send(appendResult(nil, frameDone, h.number, result{code: codeCount}))
		}},
		{"descriptors nobody asked for", engine.Write, false, func(c *rawConn) {
			c.send(welcome)
			if c.conn.overTCP() {
				c.send(appendHeader(nil, frameHello, 0, 0, 0)) // there are none
				return
			}
			for range maxPendingFDs + 1 {
				if err := writeFD(c.conn.unix, appendHeader(nil, frameUnmap, 0, 9, 0), 0); err != nil {
					c.t.Fatal(err)
				}
			}
		}},
		{"too much data", engine.Read, true, func(c *rawConn) {
			c.send(welcome)
			h, _ := c.wantFrame(frameRead)
			c.send(frame(frameData, 0, h.number, make([]byte, size)))
			c.send(frame(frameData, 0, h.number, make([]byte, 1)))
		}},
		{"too little data", engine.Read, true, func(c *rawConn) {
			c.send(welcome)
			h, _ := c.wantFrame(frameRead)
			c.send(frame(frameData, 0, h.number, make([]byte, size-1)))
			c.send(appendResult(nil, frameReadDone, h.number, result{}))
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := kind.agent(t, "a", engine.AgentConfig{})
			local := foreign(t, size)
			register(t, a, local)
			f := kind.fakeTarget(t, size)
			f.regions[0].shared = !c.foreign
			r := transfer(t, a, engine.Spec{
				Op: c.op, Remote: loadBytes(t, a, f.encode()), Post: true, HasNotif: true,
				LocalList:  newList(t, a, local.pages(size)...),
				RemoteList: newList(t, a, pagesAt(1<<20, size, size)...),
			})
			raw := f.accept(t)
			c.act(raw)
			raw.wantClosed()
			mustFail(t, a, r, engine.ErrBackend, engine.ErrPeerLost, errProtocol)
			if n := a.Stats().Dropped; n != 1 {
				t.Fatalf("%d connections dropped", n)
			}
		})
	}
}

// TestBadDescriptor: memory that a target hands over and that is not safe to map is not
// mapped; the bytes go through the connection.
func TestBadDescriptor(t *testing.T) {
	const size = 8192
	small, unsealed, sealed := shared(t, size/2), unsealedKind.get(t, size), shared(t, size)
	readOnly := unsealedKind.get(t, size)
	unix.Munmap(readOnly.data)
	if _, err := unix.FcntlInt(uintptr(readOnly.fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(pipe[0]); unix.Close(pipe[1]) })
	cases := []struct {
		name string
		fd   int
		off  int64
		// says says of which file the answer claims to be.
		says int
	}{
		{"no room for it", sealed.fd, 0, sealed.fd},
		{"none", -1, 0, sealed.fd},
		{"of another answer", sealed.fd, 0, small.fd},
		{"too small", small.fd, 0, small.fd},
		{"beyond the end", sealed.fd, 1, sealed.fd},
		{"far beyond the end", sealed.fd, math.MaxInt64, sealed.fd},
		{"not sealed", unsealed.fd, 0, unsealed.fd},
		{"sealed against writing", readOnly.fd, 0, readOnly.fd},
		{"a pipe", pipe[1], 0, pipe[1]},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := newTestAgent(t, "a", engine.AgentConfig{})
			local := foreign(t, size)
			register(t, a, local)
			fill(local.data, 1)
			f := newFakeTarget(t, size)
			r := transfer(t, a, engine.Spec{
				Op: engine.Write, Remote: loadBytes(t, a, f.encode()), Post: true,
				LocalList:  newList(t, a, local.pages(size)...),
				RemoteList: newList(t, a, pagesAt(1<<20, size, size)...),
			})
			raw := f.accept(t)
			raw.send(appendWelcome(nil, f.id))
			if h, _ := raw.wantFrame(frameMap); h.number != 5 {
				t.Fatalf("map of region %d", h.number)
			}
			var st unix.Stat_t
			if err := unix.Fstat(c.says, &st); err != nil {
				t.Fatal(err)
			}
			answer := regionAnswer{code: codeOK, grant: 3, off: c.off, dev: uint64(st.Dev), inode: st.Ino}.append(nil, 5)
			if c.name == "no room for it" {
				openNoMore(t)
			}
			if c.fd < 0 {
				raw.send(answer)
			} else if err := writeFD(raw.conn.unix, answer, c.fd); err != nil {
				t.Fatal(err)
			}
			if h, _ := raw.wantFrame(frameUnmapped); h.number != 3 {
				t.Fatalf("end of grant %d", h.number)
			}
			h, body := raw.wantFrame(frameWrite)
			if _, err := parseWrite(body, raw.frames.left); err != nil {
				t.Fatal(err)
			}
			wantBytes(t, raw.payload(), local.data)
			if commit, _ := raw.wantFrame(frameCommit); commit.number != h.number {
				t.Fatal("commit of another transfer")
			}
			raw.send(appendResult(nil, frameDone, h.number, result{}))
			mustSucceed(t, a, r)
			// Recalled all the same: it is not held.
			raw.send(appendHeader(nil, frameUnmap, 0, 3, 0))
			raw.wantFrame(frameUnmapped)
		})
	}
}

// openNoMore takes from this process, until the test ends, the right to open files.
func openNoMore(t *testing.T) {
	t.Helper()
	free, err := unix.Dup(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(free)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: uint64(free), Max: limit.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	})
}

// asOther runs f on a thread of another user.
func asOther(t *testing.T, f func() error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if _, _, errno := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); errno != 0 {
			errs <- fmt.Errorf("setresuid: %w", errno)
			return
		}
		errs <- f()
	}()
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
}

func TestOtherUser(t *testing.T) {
	t.Run("initiator", func(t *testing.T) {
		b := newTestAgent(t, "b", engine.AgentConfig{})
		asOther(t, func() error {
			conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: b.address, Net: "unix"})
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Read(make([]byte, 1)) // until it is closed
			if err == nil {
				return fmt.Errorf("the agent spoke")
			}
			return nil
		})
		eventually(t, "counting", func() bool { return b.Stats().Refused == 1 })
	})
	t.Run("target", func(t *testing.T) {
		a := newTestAgent(t, "a", engine.AgentConfig{})
		local := foreign(t, 4096)
		register(t, a, local)
		var f *fakeTarget
		asOther(t, func() error { f = newFakeTarget(t, 4096); return nil })
		r := transfer(t, a, engine.Spec{
			Op: engine.Write, Remote: loadBytes(t, a, f.encode()), Post: true,
			LocalList:  newList(t, a, local.pages(4096)...),
			RemoteList: newList(t, a, pagesAt(1<<20, 4096, 4096)...),
		})
		mustFail(t, a, r, engine.ErrBackend, engine.ErrPeerLost, errOtherUser)
	})
}
