package embedded

import "sync/atomic"

// route is the way to a peer's region.
type route uint32

const (
	routeUnknown route = iota // not asked for yet, or let go
	routeAsked
	routeMapped
	routeLeaving // mapped no more, but perhaps still held; to be asked for after that
	routeSocket  // for good
)

// remoteRegion is a region that a peer registered.
type remoteRegion struct {
	id      uint64
	addr, n uint64
	shared  bool

	route   atomic.Uint32           // changes under peer.mu
	mapping atomic.Pointer[mapping] // set while routeMapped

	// Guarded by peer.mu.
	gone    bool       // newer metadata is without it
	waiters []*request // while routeAsked or routeLeaving
}

func (r *remoteRegion) span() span       { return span{r.addr, r.addr + r.n} }
func (r *remoteRegion) way() route       { return route(r.route.Load()) }
func (r *remoteRegion) setRoute(w route) { r.route.Store(uint32(w)) }

// takeMapping takes the region's mapping out of use, for the caller to revoke without
// peer.mu. peer.mu is held.
func (r *remoteRegion) takeMapping() *mapping {
	m := r.mapping.Swap(nil)
	if m != nil {
		r.setRoute(routeLeaving)
	}
	return m
}

// remoteMapping is a mapping until it is unmapped.
type remoteMapping struct {
	*mapping
	region *remoteRegion
}
