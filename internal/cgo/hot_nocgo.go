//go:build !cgo

package cgo

import (
	"fmt"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// haveShim says that this build has no C shim.
const haveShim = false

func newShimCalls(*table) (hotCalls, error) {
	return nil, fmt.Errorf("%w: calls by cgo: built with CGO_ENABLED=0", engine.ErrUnsupported)
}
