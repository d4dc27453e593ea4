package kvreceiver

import (
	"slices"
	"sync"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// robot is a prefill rank that serves every room by itself, and answers every abort, until it
// is stopped. Its socket may be closed and opened at any time; what cannot be sent meanwhile
// is lost, as with a process that has gone.
type robot struct {
	*rank
	dialect func(nixlkv.Room) dialect
	serves  func(nixlkv.Room) bool // or lets a room wait

	socket sync.Mutex // guards ctl
	stop   chan struct{}
	over   chan struct{}
}

func eitherDialect(id nixlkv.Room) dialect { return dialects[id%2] }

func always(nixlkv.Room) bool { return true }

// robots makes all ranks of a prefill robots.
func (p *site) robots(d func(nixlkv.Room) dialect, serves func(nixlkv.Room) bool) (all []*robot) {
	for _, r := range p.ranks {
		b := &robot{rank: r, dialect: d, serves: serves, stop: make(chan struct{}), over: make(chan struct{})}
		go b.run()
		p.t.Cleanup(b.end)
		all = append(all, b)
	}
	return all
}

func (b *robot) end() {
	close(b.stop)
	<-b.over
}

func (b *robot) run() {
	defer close(b.over)
	registered := map[string]bool{} // by agent, at this socket
	for {
		b.mu.Lock()
		var next wire.Message
		some := len(b.inbox) > 0
		if some {
			next = b.inbox[0]
			b.inbox = slices.Delete(b.inbox, 0, 1)
		}
		changed := b.changed
		b.mu.Unlock()
		if !some {
			select {
			case <-changed:
				continue
			case <-b.stop:
				return
			}
		}
		switch m := next.(type) {
		case nil: // the socket is another one
			clear(registered)
		case *wire.Registration:
			registered[m.Agent] = true
			b.mu.Lock()
			known := b.peers[m.Agent] != nil
			b.mu.Unlock()
			if !known {
				b.learn(m)
			}
		case *wire.Metadata:
			if !registered[m.Agent] {
				b.t.Errorf("rank %d: the metadata of room %d came before the registration", b.number, m.Room)
				return
			}
			if b.serves(m.Room) && !m.Dummy {
				b.answer(m)
			}
		case *wire.Abort:
			if m.From.IsZero() {
				continue // it asks for no answer
			}
			frames, err := new(wire.Encoder).AbortAck(&wire.AbortAck{Room: m.Room, PrefillRank: b.number, Generation: m.Generation, HasGeneration: true})
			b.try(m.From, frames, err)
		}
	}
}

// answer writes a room: its i-th page is this one's (room + i) mod kitPages.
func (b *robot) answer(m *wire.Metadata) {
	d := b.dialect(m.Room)
	w := work{slot: 1}
	for i := range m.KVIndices {
		w.src = append(w.src, int32(m.Room+nixlkv.Room(i))%kitPages)
	}
	b.kv(m, d, w)
	b.aux(m, d, w.slot, len(w.src) == 0)
	if d == byStatus {
		frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: m.Room, Status: wire.PollSuccess, PrefillRank: b.number})
		b.try(m.From, frames, err)
	}
}

// try sends if there is a socket.
func (b *robot) try(to wire.Endpoint, frames [][]byte, err error) {
	if err != nil {
		b.t.Error(err)
		return
	}
	at, err := control.NewEndpoint(to.IP, to.Port)
	if err != nil {
		b.t.Error(err)
		return
	}
	b.socket.Lock()
	defer b.socket.Unlock()
	_ = b.ctl.SendAsync(control.Message{To: at, Frames: frames}, func(uint64, error) {})
}

// flap closes the socket and opens it again at the same port.
func (b *robot) flap() {
	b.socket.Lock()
	defer b.socket.Unlock()
	b.die()
	b.mu.Lock()
	b.inbox = append(b.inbox, nil)
	close(b.changed)
	b.changed = make(chan struct{})
	b.mu.Unlock()
	b.listen(b.info.RankPort)
}

// arrived says whether a room's one page, and its aux slot, are those of the robots.
func (q *pair) arrived(id nixlkv.Room, page int32, slot int) bool {
	src := int(id) % kitPages
	for r := range kitRegions {
		s, d := (r*kitPages+src)*kitPage, (r*kitPages+int(page))*kitPage
		if !slices.Equal(q.mem.kv.Bytes()[d:d+kitPage], q.prefills.kv.Bytes()[s:s+kitPage]) {
			return false
		}
	}
	return slices.Equal(q.mem.aux.Bytes()[slot*kitAux:(slot+1)*kitAux], q.prefills.aux.Bytes()[kitAux:2*kitAux])
}

// wipe clears a page and a slot before they are published.
func (q *pair) wipe(page int32, slot int) {
	for r := range kitRegions {
		d := (r*kitPages + int(page)) * kitPage
		clear(q.mem.kv.Bytes()[d : d+kitPage])
	}
	clear(q.mem.aux.Bytes()[slot*kitAux : (slot+1)*kitAux])
}
