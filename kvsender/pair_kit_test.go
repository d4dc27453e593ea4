package kvsender

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/sentinels"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, m *Manager, id nixlkv.Room) *Sender {
	t.Helper()
	s, err := m.Open(id)
	ok(t, err)
	return s
}

// pairUp is a prefill and a decode over one engine.
type pairUp struct {
	m   *Manager
	src *kitMemory
	d   *decode
}

func newPair(t *testing.T, e *nixl.Engine, frames int, opts ...Option) *pairUp {
	t.Helper()
	return newPairOf(t, e, frames, func(*registry.Layout) {}, opts...)
}

// newPairOf is newPair with a prefill of another layout over the same memory.
func newPairOf(t *testing.T, e *nixl.Engine, frames int, edit func(*registry.Layout), opts ...Option) *pairUp {
	t.Helper()
	p := &pairUp{src: newKitMemory(t, 4)}
	p.src.fill()
	l := p.src.layout()
	edit(l)
	var err error
	p.m, err = NewManager(t.Context(), l, append([]Option{WithEngine(e)}, opts...)...)
	ok(t, err)
	p.d = newDecode(t, e, p.m, newKitMemory(t, 4), frames)
	t.Cleanup(func() {
		closeManager(t, p.m)
		p.d.close()
		p.src.free(t)
		p.d.mem.free(t)
	})
	return p
}

// connect registers the decode and has it taken up, by a first room that it is told of.
func (p *pairUp) connect(t *testing.T, first nixlkv.Room) {
	t.Helper()
	p.d.register(p.d.registration())
	p.transfer(t, first)
	p.d.status(first)
}

// dialects are the two ways in which success is told.
var dialects = []struct {
	name   string
	frames int
}{{"notifications", 24}, {"status", 25}}

func eachDialect(t *testing.T, f func(t *testing.T, e *nixl.Engine, frames int)) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		for _, d := range dialects {
			t.Run(d.name, func(t *testing.T) { f(t, e, d.frames) })
		}
	})
}

// checkTags checks the notifications of a room of so many chunks, all with pages.
func checkTags(t *testing.T, tags []wire.Tag, id nixlkv.Room, chunks int) {
	t.Helper()
	seen := map[int]bool{}
	aux := 0
	for _, g := range tags {
		if g.Room != id {
			t.Errorf("tag of room %d: %+v", g.Room, g)
		}
		switch g.Kind {
		case wire.TagKV:
			if seen[g.Chunk] || g.Last != (g.Chunk == chunks-1) || g.Source != 0 {
				t.Errorf("tag %+v", g)
			}
			seen[g.Chunk] = true
		case wire.TagAux:
			aux++
		default:
			t.Errorf("tag %+v", g)
		}
	}
	if len(seen) != chunks || aux != 1 {
		t.Errorf("%d chunks and %d aux, want %d and 1", len(seen), aux, chunks)
	}
}

// wantFailure checks how a room failed on this side, and what its decode was told.
func wantFailure(t *testing.T, s *Sender, d *decode, want error, text string) {
	t.Helper()
	err := s.Wait(within(t))
	var te *KVTransferError
	if !errors.As(err, &te) || te.Room != s.Room() || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want %v with %q", err, want, text)
	}
	if err := sentinels.Repeated(err); err != nil {
		t.Error(err)
	}
	if s.Status() != nixlkv.Failed || s.Err() == nil {
		t.Errorf("status %v, error %v", s.Status(), s.Err())
	}
	if d != nil {
		if st := d.status(s.Room()); st.Status != wire.PollFailed || !strings.Contains(st.Reason, text) {
			t.Errorf("the decode was told %+v, want a failure with %q", st, text)
		}
	}
	ok(t, s.Close())
}
