package embedded

import (
	"fmt"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// places is the memory that the bytes of a frame go to, or come from, in order. Nobody
// waits for a peer between hold and let.
type places interface {
	// hold appends the memory of the next bytes to a vector that is not full, limit of them
	// at most, and keeps it registered until let. It gives how many bytes that is; 0 says
	// that the rest has no place: what comes is to be dropped, and zeros are to be sent.
	hold(v *vector, limit uint64) (n uint64)
	// let ends hold; the first n of the bytes were moved. A fault says that the others
	// could not be, because memory is not there.
	let(n uint64, fault error)
}

// partPlaces is memory of the target: parts of regions that it registered. Between hold
// and let the regions cannot be deregistered; what was deregistered in between, or is not
// in bounds, is not touched.
type partPlaces struct {
	a     *Agent
	table parts
	i     int    // the part that is next
	off   uint64 // bytes of it that are done

	outcome result // codeOK, or why the rest is not moved

	// The last region looked up. One that is deregistered stays shut.
	region *localRegion
	held   []*localRegion
	pieces int  // held
	single bool // hold one piece at a time, to learn which one cannot be accessed
}

// start begins with another table.
func (m *partPlaces) start(table parts) {
	m.table, m.i, m.off = table, 0, 0
	m.outcome, m.single = result{}, false
}

func (m *partPlaces) hold(v *vector, limit uint64) (sum uint64) {
	m.pieces = 0
	off := m.off
	for i := m.i; m.outcome.code == codeOK && i < m.table.len() && !v.full() && !(m.single && m.pieces > 0); i++ {
		pt := m.table.at(i)
		n := min(pt.n-off, limit-sum)
		if n == 0 && pt.n > 0 {
			break // the limit is reached
		}
		addr, ok := m.use(pt)
		if !ok {
			// What comes before it is moved first.
			if sum == 0 {
				m.outcome = result{codeNotRegistered, pt}
			}
			break
		}
		if n > 0 {
			v.add(memoryAt(addr+off, n))
			m.pieces++
			sum += n
		}
		if off+n < pt.n {
			break
		}
		off = 0
	}
	return sum
}

// use holds the region of a part, and gives the part's address if it is in bounds.
func (m *partPlaces) use(pt part) (addr uint64, ok bool) {
	if m.region == nil || m.region.id != pt.region {
		if m.region = m.a.region(pt.region); m.region == nil {
			return 0, false
		}
	}
	if n := len(m.held); n == 0 || m.held[n-1] != m.region {
		if !m.region.uses.acquire() {
			return 0, false
		}
		m.held = append(m.held, m.region)
	}
	return m.region.contains(pt.off, pt.n)
}

func (m *partPlaces) let(n uint64, fault error) {
	for _, r := range m.held {
		r.uses.release()
	}
	clear(m.held)
	m.held = m.held[:0]
	for n > 0 {
		left := m.table.at(m.i).n - m.off
		if n < left {
			m.off += n
			break
		}
		n -= left
		m.i, m.off = m.i+1, 0
	}
	switch {
	case fault == nil:
	case m.pieces > 1:
		m.single = true
	default:
		for m.table.at(m.i).n == m.off { // empty ones were passed over
			m.i, m.off = m.i+1, 0
		}
		m.outcome = result{codeFault, m.table.at(m.i)}
	}
}

// check sets the outcome if a part is not in bounds, before any byte is moved, and gives
// how many bytes there are.
func (m *partPlaces) check() (sum uint64) {
	for i := range m.table.len() {
		pt := m.table.at(i)
		if _, ok := m.use(pt); !ok {
			m.outcome = result{codeNotRegistered, pt}
			break
		}
		sum += pt.n
	}
	m.let(0, nil)
	return sum
}

// finish gives how it went when all bytes were moved. Empty parts have to be in bounds as
// well, also at the end.
func (m *partPlaces) finish() result {
	m.hold(&vector{}, 0)
	m.let(0, nil)
	return m.outcome
}

// itemPlaces is memory of the initiator: what a request moves through the connection. The
// request is in progress, which keeps it registered.
type itemPlaces struct {
	r  *request
	at cursor
}

func (m *itemPlaces) hold(v *vector, limit uint64) (sum uint64) {
	if m.r.failed() != nil {
		return 0
	}
	for at := m.at; sum < limit && !v.full(); {
		part, ok := m.r.nextSocket(&at, limit-sum)
		if !ok {
			break
		}
		v.add(memoryAt(part.local, part.n))
		sum += part.n
	}
	return sum
}

func (m *itemPlaces) let(n uint64, fault error) {
	if fault != nil {
		m.r.failWith(fmt.Errorf("transfer with peer %q: local %w: %w", m.r.peer.name, fault, engine.ErrBackend))
	}
	for n > 0 {
		part, ok := m.r.nextSocket(&m.at, n)
		if !ok {
			return
		}
		n -= part.n
	}
}
