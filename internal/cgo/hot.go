package cgo

import (
	"fmt"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// hotCalls are the calls on a transfer's path. Each is one crossing into C where the build
// has cgo, and a loop of purego calls elsewhere. They allocate nothing, check nothing, and
// may be used from many goroutines.
type hotCalls interface {
	name() string

	// append adds descriptors to a list; device ids are ANDed with devMask.
	append(list engine.List, d []engine.Desc, devMask uint64) engine.Status
	// appendRuns adds the descriptors that the runs stand for.
	appendRuns(list engine.List, r []engine.Run, devMask uint64) engine.Status
	// clear empties a list; the library keeps its memory.
	clear(list engine.List) engine.Status
	// create makes a request, and posts it if the Spec says so. The status of the posting is
	// meaningless when making failed.
	create(agent uintptr, s *engine.Spec) (r engine.Request, made, posted engine.Status)
	// post posts a request. With has, the notification is replaced.
	post(agent uintptr, r engine.Request, notif []byte, has bool) engine.Status
	// poll fills out[:len(reqs)].
	poll(agent uintptr, reqs []engine.Request, out []engine.Status)
	// release gives up what the library holds of a transfer and the handle it came in.
	release(agent uintptr, r engine.Request) engine.Status
	// notify sends a notification without a transfer.
	notify(agent uintptr, r engine.Remote, msg []byte) engine.Status
	// drain writes the notifications in notifMap to buf as records (engine.Notifications),
	// after fetching new ones if fetch is set, and empties the map. When buf is too small it
	// writes nothing, keeps the map, and need says how large buf must be.
	drain(agent, notifMap uintptr, fetch bool, buf []byte) (need, count int, st engine.Status)
}

// newHotCalls picks an implementation: "cgo", "purego", or "" for the faster one.
func newHotCalls(which string, t *table) (hotCalls, error) {
	switch {
	case which == "purego" || which == "" && !haveShim:
		return &puregoCalls{sym: t}, nil
	case which == "cgo" || which == "":
		return newShimCalls(t)
	default:
		return nil, fmt.Errorf("%w: calls by %q (known: cgo, purego)", engine.ErrUnsupported, which)
	}
}
