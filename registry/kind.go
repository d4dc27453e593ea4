package registry

import (
	"fmt"
	"strconv"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

var kindNames = [...]string{Unset: "unset", VRAM: "VRAM", DRAM: "DRAM"}

// String gives NIXL's name of the kind, or "unset".
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}

// ParseKind reads NIXL's name, VRAM or DRAM. Anything else is an error that wraps
// nixlkv.ErrMemoryKinds.
func ParseKind(s string) (Kind, error) {
	switch s {
	case "VRAM":
		return VRAM, nil
	case "DRAM":
		return DRAM, nil
	}
	return Unset, fmt.Errorf("%w: expected VRAM or DRAM, got %.40q", nixlkv.ErrMemoryKinds, s)
}

// check refuses kinds that no memory has.
func (k Kind) check() error {
	switch k {
	case VRAM, DRAM:
		return nil
	case Unset:
		return nixlkv.ErrMissingMemoryKind
	default:
		return nixlkv.ErrMemoryKinds
	}
}

// SourceKind gives the one memory kind of a prefill's KV regions. A prefill sends from one
// kind only (_homogeneous_kv_mem_kind in SGLang's nixl/conn.py).
//
// The error wraps nixlkv.ErrMissingMemoryKind for a layout without KV regions or with an unset
// kind, and nixlkv.ErrMemoryKinds for mixed or unknown ones.
func (l *Layout) SourceKind() (Kind, error) {
	k, err := oneKind(l.KV, "source")
	if err != nil {
		return Unset, fmt.Errorf("layout: %w", err)
	}
	return k, nil
}

// DestinationKind gives the one memory kind of a peer's KV regions. Errors are those of
// [Layout.SourceKind]. A plan that sends to mixed kinds segment by segment need not ask.
func (p *Peer) DestinationKind() (Kind, error) {
	k, err := oneKind(p.KV, "destination")
	if err != nil {
		return Unset, fmt.Errorf("peer %s: %w", p.Agent, err)
	}
	return k, nil
}

// oneKind keeps SGLang's "Missing NIXL … KV memory kind", which operators search for.
func oneKind(regions []Region, side string) (Kind, error) {
	if len(regions) == 0 {
		return Unset, fmt.Errorf("%w: Missing NIXL %s KV memory kind: no KV regions", nixlkv.ErrMissingMemoryKind, side)
	}
	first := regions[0].Kind
	for i := range regions {
		switch k := regions[i].Kind; {
		case k == Unset:
			return Unset, fmt.Errorf("%w: Missing NIXL %s KV memory kind: KV[%d].Kind is unset", nixlkv.ErrMissingMemoryKind, side, i)
		case k.check() != nil:
			return Unset, fmt.Errorf("%w: KV[%d].Kind: expected VRAM or DRAM, got %v", nixlkv.ErrMemoryKinds, i, k)
		case k != first:
			return Unset, fmt.Errorf("%w: mixed NIXL %s KV memory kinds: KV[0] is %v, KV[%d] is %v", nixlkv.ErrMemoryKinds, side, first, i, k)
		}
	}
	return first, nil
}

func kindOfWire(k wire.Kind) Kind {
	switch k {
	case wire.VRAM:
		return VRAM
	case wire.DRAM:
		return DRAM
	default:
		return Unset
	}
}

func (k Kind) wire() wire.Kind {
	switch k {
	case VRAM:
		return wire.VRAM
	case DRAM:
		return wire.DRAM
	default:
		return wire.KindUnset
	}
}
