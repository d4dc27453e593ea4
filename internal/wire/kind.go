package wire

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"github.com/nixlkv/nixlkv"
)

// Kind is the NIXL memory kind of a KV region. The zero value is unset and goes on no wire.
type Kind uint8

// The kinds that SGLang's NIXL backend knows (KV_MEM_KINDS in nixl/conn.py).
const (
	KindUnset Kind = iota
	VRAM
	DRAM
)

var kindNames = [...]string{KindUnset: "unset", VRAM: "VRAM", DRAM: "DRAM"}

// String gives NIXL's name.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}

// parseKinds reads comma-separated names, one for each of n regions. Nothing means that
// all are VRAM.
func parseKinds(b []byte, n int) ([]Kind, error) {
	got := bytes.Count(b, []byte{','}) + 1
	if len(b) == 0 {
		got = 0
	}
	switch {
	case got == 0 && n == 0:
		return nil, nil
	case got == 0:
		return slices.Repeat([]Kind{VRAM}, n), nil
	case got != n:
		return nil, fmt.Errorf("%w: expected one for each of %d regions, got %d", nixlkv.ErrMemoryKinds, n, got)
	}
	kinds := make([]Kind, n)
	for i := range kinds {
		name, rest, _ := bytes.Cut(b, []byte{','})
		switch string(name) {
		case "VRAM":
			kinds[i] = VRAM
		case "DRAM":
			kinds[i] = DRAM
		default:
			return nil, fmt.Errorf("%w: unsupported kind %s of region %d", nixlkv.ErrMemoryKinds, quoted(name), i)
		}
		b = rest
	}
	return kinds, nil
}

// appendKinds appends the names, comma-separated.
func appendKinds(dst []byte, kinds []Kind) []byte {
	for i, k := range kinds {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, k.String()...)
	}
	return dst
}
