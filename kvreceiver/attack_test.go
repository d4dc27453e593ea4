package kvreceiver

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// raw sends frames as they are.
func (r *rank) raw(to wire.Endpoint, frames ...string) {
	r.t.Helper()
	var out [][]byte
	for _, f := range frames {
		out = append(out, []byte(f))
	}
	r.send(to, out, nil)
}

// Nothing that comes over the control socket ends the loop that reads it, and nothing in it
// is taken for a room's.
func TestGarbageOnTheControlSocket(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	r, told := q.published(7)
	to := told[0].From
	garbage := [][]string{
		{""}, {"hello"}, {"KV_STATUS"}, {"KV_STATUS", "7"}, {"KV_STATUS", "7", "4"}, {"KV_STATUS", "7", "4", "0"},
		{"KV_STATUS", "7", "9", "0", ""}, {"KV_STATUS", "7", "-1", "0", ""}, {"KV_STATUS", "7", "4", "-1", ""}, {"KV_STATUS", "7", "4", "0x0", ""},
		{"KV_STATUS", " 7", "4", "0", ""}, {"KV_STATUS", "99999999999999999999", "4", "0", ""}, {"KV_STATUS", "7", "4", "", ""},
		{"ABORT_ACK"}, {"ABORT_ACK", "7"}, {"ABORT_ACK", "x", "0"}, {"ABORT_ACK", "7", "0", "-1"}, {"ABORT_ACK", "7", "0", "18446744073709551616"},
		{"NixlMsgGuard", "None"}, {"ABORT", "7"}, {"BOOTSTRAP", "7", "127.0.0.1", "1"}, slices.Repeat([]string{"x"}, 100),
		{strings.Repeat("KV_STATUS", 1000)},
	}
	for _, g := range garbage {
		p.raw(to, g...)
	}
	staging := [][]string{{"STAGING_REQ", "7", "0", "1", "a"}, {"CHUNK_READY", "7", "0", "0", "1", "a", "0"}}
	for _, g := range staging {
		p.raw(to, g...)
	}
	// Bytes that are no ZMTP at all.
	c, err := net.Dial("tcp", q.m.Addr())
	ok(t, err)
	_, err = c.Write(bytes.Repeat([]byte{0xff, 0x00, 0x7f, 'G', 'E', 'T', ' '}, 50))
	ok(t, err)
	ok(t, c.Close())
	p.raw(to, "KV_STATUS", "7", "1", "0", "") // behind all of it
	eventually(t, "all of it", func() bool { return q.m.Stats().Statuses == 1 })
	if s := q.m.Stats(); s.Refused != uint64(len(garbage)) || s.Dropped != uint64(len(staging)) || s.Unknown != 1 || ended(r) || s.Control.Panics != 0 {
		t.Errorf("ended %v, stats %+v", ended(r), s)
	}
	// A reason that is long, and not text.
	p.raw(to, "KV_STATUS", "7", "0", "0", strings.Repeat("\xff\x00", 1<<20))
	te := checkFailed(t, r, nixlkv.ErrPeerFailed, "�")
	if len(te.Reason) > 1<<14 {
		t.Errorf("a reason of %d bytes", len(te.Reason))
	}
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	q.oneRoom(8, byStatus, 1, 1)
}

// Nor do notifications, by whoever they are.
func TestGarbageNotifications(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPair(t, e, shape{})
		p := q.p.ranks[0]
		r, told := q.published(7)
		remote := p.peer(told[0].Agent).remote
		garbage := []string{
			"x", "_", "7", "7_", "7_kv", "7_kv_0_1", "7_kv_0_2_0", "7_kv_-1_1_0", "7_kv_0_1_0_part", "7_kv_0_1_0_part_2_2", "7_kv_0_1_0_part_0_0",
			"7_aux_nokv", "7_aux_nokv_0", "-7_aux", "99999999999999999999_aux", "7_state", "7_state_0", "7_what", "\xff\xfe", strings.Repeat("7", 1000), strings.Repeat("_", 600),
		}
		unknown := []string{"8_aux", "0_aux", "9223372036854775807_kv_0_1_0", "8_state_0_0"}
		for _, g := range slices.Concat(garbage, unknown, []string{"7_stg_0_1_0_0_0_1_agent"}) {
			ok(t, remote.Notify([]byte(g)))
		}
		eventually(t, "all of them", func() bool { return q.m.Stats().Notifications == uint64(len(garbage)+len(unknown)+1) })
		if s := q.m.Stats(); s.Refused != uint64(len(garbage)) || s.Unknown != uint64(len(unknown)) || s.Dropped != 1 || ended(r) {
			t.Errorf("ended %v, stats %+v", ended(r), s)
		}
		p.serve(told[0], byNotifications, work{src: []int32{1, 2}})
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
	})
}

// Tags that contradict each other fail the room, which says whose they were, and the prefill
// is told.
func TestContradictionsFailTheRoom(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	for i, tc := range []struct {
		tags []string
		text string
	}{
		{[]string{"_kv_0_1_0_part_0_2", "_kv_0_1_0_part_1_3"}, "part count mismatch"},
		{[]string{"_kv_1_1_0", "_kv_3_1_0"}, "source 0, chunk 3 of 2"},
		{[]string{"_kv_0_0_0", "_kv_0_0_9"}, "more than 1 sources: 9"},
		{[]string{"_aux_nokv_0_1", "_kv_1_0_0"}, "source 0, chunk 1 of 1"},
	} {
		id := nixlkv.Room(i + 1)
		r, told := q.published(id)
		for _, tag := range tc.tags {
			ok(t, p.peer(told[0].Agent).remote.Notify([]byte(id.String()+tag)))
		}
		te := checkFailed(t, r, nixlkv.ErrMalformed, tc.text)
		if !strings.Contains(te.Reason, p.agent.Name()) {
			t.Errorf("%q does not name %s", te.Reason, p.agent.Name())
		}
		p.ack(p.aborted(id))
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
	}
}

// A rank that is another prefill's, or another socket altogether, cannot free a room's pages
// nor end it: unless it names the room, its rank and the abort, and then nobody could tell.
func TestStrangersAnswers(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	other := q.another(shape{tp: 4})
	stranger := other.p.ranks[3] // a number that is not the room's
	r, _ := q.published(7)
	r.Abort("")
	a := q.p.ranks[0].aborted(7)
	stranger.ack(a)
	stranger.plainAck(a)
	stranger.tell(a.From, 7, wire.PollFailed, "")
	stranger.tell(a.From, 7, wire.PollSuccess, "")
	eventually(t, "four messages", func() bool { s := q.m.Stats(); return s.AbortAcks+s.Statuses == 4 })
	if isReleased(r) || q.m.Stats().Unknown != 4 {
		t.Errorf("released %v, stats %+v", isReleased(r), q.m.Stats())
	}
	q.p.ranks[0].ack(a)
	q.p.ranks[1].ack(q.p.ranks[1].aborted(7))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}

// A prefill that names a rank's socket which is no ZMQ socket, or closes at once, fails the
// room in time and leaves nothing.
func TestSocketsThatAreNone(t *testing.T) {
	for name, serve := range map[string]func(net.Conn){
		"silent": func(net.Conn) {},
		"closes": func(c net.Conn) { _ = c.Close() },
		"HTTP":   func(c net.Conn) { _, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) },
	} {
		t.Run(name, func(t *testing.T) {
			q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithSendTimeout(200*time.Millisecond))
			l, err := net.Listen("tcp", "127.0.0.1:0")
			ok(t, err)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					defer func() { _ = c.Close() }()
					serve(c)
				}
			}()
			defer func() { _ = l.Close(); <-ended }()
			p := q.p.ranks[0]
			p.info.RankPort = l.Addr().(*net.TCPAddr).Port
			p.register()
			r := q.open(1)
			checkError(t, r, r.Connect(within(t)), nixlkv.ErrSendBlocked, "")
			ok(t, r.Close())
			eventually(t, "the link to go", func() bool { return q.m.Stats().Ranks == 0 })
		})
	}
}

// A rank that takes connections and reads nothing holds up its own rooms alone, which fail in
// the send timeout.
func TestRankThatReadsNothing(t *testing.T) {
	small := func(l *registry.Layout) { // pages, so that much is said of them
		for i := range l.KV {
			l.KV[i].ItemLen = 4
		}
	}
	q := newPairOf(t, openEngine(t, nixl.Embedded), shape{}, small, nil, WithSendTimeout(500*time.Millisecond), WithReleaseTimeout(500*time.Millisecond))
	p := q.p.ranks[0]
	other := q.another(shape{})
	p.die()
	block := make(chan struct{})
	var err error
	p.ctl, err = control.New(control.Config{Port: p.info.RankPort, Limits: control.Limits{RecvHWM: 1}, Handler: func([][]byte) { <-block }})
	ok(t, err)
	defer close(block)
	pages := make([]int32, kitPages*kitPage/4)
	for i := range pages {
		pages[i] = int32(i)
	}
	var rooms []*Receiver
	for q.m.Stats().Failed == 0 {
		r := q.open(nixlkv.Room(100 + len(rooms)))
		ok(t, r.Connect(within(t)))
		if err := r.Publish(Destination{Pages: pages, Aux: Aux(0)}); err != nil && !errors.As(err, new(*KVTransferError)) {
			t.Fatal(err)
		}
		rooms = append(rooms, r)
	}
	lives, told := other.published(5)
	other.p.ranks[0].serve(told[0], byStatus, work{src: []int32{1, 2}})
	ok(t, lives.Wait(within(t)))
	ok(t, lives.Close())
	i := slices.IndexFunc(rooms, ended)
	checkFailed(t, rooms[i], nixlkv.ErrSendBlocked, "send_metadata to prefill")
	for _, r := range rooms {
		ok(t, r.Close())
	}
	eventually(t, "the rooms to be given up", func() bool { return q.m.Stats().Waiting == 0 })
	if err := rooms[i].Released(within(t)); err != nil {
		t.Errorf("nothing was told of room %d: %v", rooms[i].Room(), err)
	}
}
