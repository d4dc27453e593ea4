//go:build linux

package gpu

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// uuid is what stays the same between CUDA, which gives 16 bytes, and NVML, which gives
// text. The zero value is none.
type uuid [16]byte

// uuidKind is what the text says that a uuid names.
type uuidKind uint8

const (
	gpuUUID       uuidKind = iota // GPU-<uuid>
	migUUID                       // MIG-<uuid>
	legacyMIGUUID                 // MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>, drivers before R470
)

var errUUID = errors.New("malformed UUID")

// dashes are the places of the dashes in 8-4-4-4-12.
var dashes = [...]int{8, 13, 18, 23}

// parseUUID reads NVML's text.
func parseUUID(s string) (uuid, uuidKind, error) {
	kind, rest := gpuUUID, s
	if cut, ok := strings.CutPrefix(s, "MIG-GPU-"); ok {
		kind = legacyMIGUUID
		var instances string
		rest, instances, _ = strings.Cut(cut, "/")
		if g, c, ok := strings.Cut(instances, "/"); !ok || !isNumber(g) || !isNumber(c) {
			return uuid{}, 0, fmt.Errorf("%w: %q", errUUID, s)
		}
	} else if cut, ok := strings.CutPrefix(s, "MIG-"); ok {
		kind, rest = migUUID, cut
	} else if rest, ok = strings.CutPrefix(s, "GPU-"); !ok {
		return uuid{}, 0, fmt.Errorf("%w: %q", errUUID, s)
	}
	var id uuid
	if len(rest) != 36 {
		return uuid{}, 0, fmt.Errorf("%w: %q", errUUID, s)
	}
	for _, i := range dashes {
		if rest[i] != '-' {
			return uuid{}, 0, fmt.Errorf("%w: %q", errUUID, s)
		}
	}
	digits := rest[:8] + rest[9:13] + rest[14:18] + rest[19:23] + rest[24:]
	if _, err := hex.Decode(id[:], []byte(digits)); err != nil || id == (uuid{}) {
		return uuid{}, 0, fmt.Errorf("%w: %q", errUUID, s)
	}
	return id, kind, nil
}

// isNumber says whether s is a short decimal number.
func isNumber(s string) bool {
	return s != "" && len(s) <= 9 && strings.Trim(s, "0123456789") == ""
}

// text writes the id as NVML does for a GPU or a MIG instance; empty for none.
func (id uuid) text(kind uuidKind) string {
	if id == (uuid{}) {
		return ""
	}
	prefix := "GPU"
	if kind == migUUID {
		prefix = "MIG"
	}
	return fmt.Sprintf("%s-%x-%x-%x-%x-%x", prefix, id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
