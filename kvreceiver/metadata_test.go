package kvreceiver

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// metadataPair is a pair whose aux slots are SGLang's metadata.
type metadataPair struct {
	*pair
	from *metadata.Buffers // the prefill's
}

func newMetadataPair(t *testing.T) metadataPair {
	t.Helper()
	l, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	ok(t, err)
	e := openEngine(t, nixl.Embedded)
	q := &pair{t: t, mem: newKitMemory(t, withAux(l)), prefills: newKitMemory(t, withAux(l))}
	q.p = newSite(t, e, q.prefills, shape{})
	q.m = newManager(t, q.mem.layout(), append(quick(e), WithMetadata(q.mem.metadataBuffers(l)))...)
	return metadataPair{q, q.prefills.metadataBuffers(l)}
}

// serve writes a room whose slot says what rec says.
func (q metadataPair) serve(id nixlkv.Room, d dialect, rec *metadata.Record) {
	q.t.Helper()
	ok(q.t, q.from.Encode(3, rec))
	q.p.ranks[0].serve(q.p.ranks[0].metadata(id), d, work{src: []int32{1}, slot: 3})
}

func TestMetadata(t *testing.T) {
	eachDialect(t, func(t *testing.T, d dialect) {
		q := newMetadataPair(t)
		var rec metadata.Record
		r := q.open(7)
		ok(t, r.Connect(within(t)))
		if err := r.Metadata(&rec, metadata.Want{}); !errors.Is(err, nixlkv.ErrNotReady) {
			t.Errorf("before the end: %v", err)
		}
		ok(t, r.Publish(Destination{Pages: []int32{1}, Aux: Aux(9)}))
		q.serve(7, d, &metadata.Record{Room: 7, OutputID: 4711, CachedTokens: metadata.CachedTokens{Cached: 12}})
		ok(t, r.Wait(within(t)))
		ok(t, r.Metadata(&rec, metadata.Want{}))
		if rec.Room != 7 || rec.OutputID != 4711 || rec.CachedTokens.Cached != 12 {
			t.Errorf("got %+v", rec)
		}
		q.mem.compare(q.prefills, placed{src: []int32{1}, dst: []int32{1}, srcSlot: 3, dstSlot: 9})
		// The next room has the slot: the first's metadata are gone.
		next := q.publish(8, Destination{Pages: []int32{1}, Aux: Aux(9)})
		if err := r.Metadata(&rec, metadata.Want{}); !errors.Is(err, metadata.ErrNotWritten) {
			t.Errorf("the slot was given to another room: %v", err)
		}
		q.serve(8, d, &metadata.Record{Room: 8, OutputID: 1})
		ok(t, next.Wait(within(t)))
		if err := r.Metadata(&rec, metadata.Want{}); !errors.Is(err, nixlkv.ErrCorruptMetadata) {
			t.Errorf("the slot holds another room: %v", err)
		}
		ok(t, r.Close())
		ok(t, next.Close())
	})
}

// A slot that tells of another room, or of none, is no success, and its pages are given back
// as after any failure.
func TestCorruptMetadata(t *testing.T) {
	eachDialect(t, func(t *testing.T, d dialect) {
		q := newMetadataPair(t)
		p := q.p.ranks[0]
		r := q.publish(7, Destination{Pages: []int32{1}, Aux: Aux(9)})
		q.serve(7, d, &metadata.Record{Room: 6})
		te := checkFailed(t, r, nixlkv.ErrCorruptMetadata, "7")
		var re *metadata.RoomError
		if !errors.As(te, &re) || re.Want != 7 || re.Got != 6 {
			t.Errorf("got %v", te)
		}
		if err := r.Metadata(new(metadata.Record), metadata.Want{}); !errors.Is(err, nixlkv.ErrCorruptMetadata) {
			t.Errorf("Metadata: %v", err)
		}
		if d == byNotifications { // else the rank has told its end
			a := p.aborted(7)
			if isReleased(r) {
				t.Error("released without an answer")
			}
			p.ack(a)
		}
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
		// The same number and slot again: what is left of the first use is not taken for the
		// second's.
		r = q.publish(6, Destination{Pages: []int32{1}, Aux: Aux(9)})
		m := p.metadata(6)
		p.kv(m, d, work{src: []int32{1}})
		if d == byStatus {
			p.tell(m.From, 6, wire.PollSuccess, "")
		} else {
			p.write(p.peer(m.Agent), []nixl.Desc{{Addr: uint64(q.prefills.kv.Addr()), Len: 1}}, []nixl.Desc{{Addr: p.peer(m.Agent).geometry.KVPtrs[0], Len: 1}}, wire.AppendAux(nil, 6))
		}
		checkFailed(t, r, nixlkv.ErrCorruptMetadata, "")
		if err := r.Err(); !errors.Is(err, metadata.ErrNotWritten) {
			t.Errorf("got %v", err)
		}
		if d == byNotifications {
			p.ack(p.aborted(6))
		}
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
		if s := q.m.Stats(); s.Succeeded != 0 || s.Failed != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

// Buffers that are not the layout's are refused, and so is asking without any.
func TestMetadataOfOtherLayouts(t *testing.T) {
	l, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	ok(t, err)
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t, withAux(l))
	for name, change := range map[string]func(*registry.Layout){
		"a buffer less": func(r *registry.Layout) { r.Aux = r.Aux[:len(r.Aux)-1] },
		"other buffers": func(r *registry.Layout) { r.Aux[0], r.Aux[5] = r.Aux[5], r.Aux[0] },
	} {
		r := mem.layout()
		change(r)
		if _, err := NewManager(t.Context(), r, WithEngine(e), WithMetadata(mem.metadataBuffers(l))); !errors.Is(err, nixlkv.ErrMismatch) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var memory [][]byte
	for i, n := range mem.auxItems {
		memory = append(memory, mem.aux.Bytes()[mem.auxAt(i):][:n*2])
	}
	few, err := metadata.NewBuffers(l, 2, memory)
	ok(t, err)
	if _, err := NewManager(t.Context(), mem.layout(), WithEngine(e), WithMetadata(few)); !errors.Is(err, nixlkv.ErrAuxIndex) {
		t.Errorf("two slots of 16: %v", err)
	}
	m := newManager(t, mem.layout(), quick(e)...)
	r, err := m.Open(1, "127.0.0.1:1")
	ok(t, err)
	if err := r.Metadata(new(metadata.Record), metadata.Want{}); !errors.Is(err, nixlkv.ErrUnsupported) {
		t.Errorf("without metadata buffers: %v", err)
	}
	ok(t, r.Close())
}

// Room 0 is what a metadata slot holds that nobody has written.
func TestMetadataOfRoomZero(t *testing.T) {
	l, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	ok(t, err)
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t, withAux(l))
	m := newManager(t, mem.layout(), append(quick(e), WithMetadata(mem.metadataBuffers(l)))...)
	if _, err := m.Open(0, "127.0.0.1:1"); !errors.Is(err, nixlkv.ErrMalformed) || !strings.Contains(err.Error(), "room 0") {
		t.Errorf("got %v", err)
	}
	r, err := m.Open(1, "127.0.0.1:1")
	ok(t, err)
	ok(t, r.Close())
	m = newManager(t, mem.layout(), quick(e)...)
	r, err = m.Open(0, "127.0.0.1:1") // the wire has nothing against it
	ok(t, err)
	ok(t, r.Close())
}
