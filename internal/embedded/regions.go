package embedded

import (
	"cmp"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// localRegion is a piece of memory that this agent registered.
type localRegion struct {
	id      uint64
	addr, n uint64
	shared  bool // fd can be handed to a peer
	fd      int  // our own descriptor of the memfd; to be read by who has a use, only
	off     int64
	dev     uint64 // of the file
	inode   uint64
	uses    uses
}

func (r *localRegion) span() span { return span{r.addr, r.addr + r.n} }

// contains gives the address of n bytes at off of the region, if they are inside of it.
func (r *localRegion) contains(off, n uint64) (addr uint64, ok bool) {
	if off > r.n || n > r.n-off {
		return 0, false
	}
	return r.addr + off, true
}

// checkMem says whether memory of this kind can be used.
func (a *Agent) checkMem(mem engine.Mem) error {
	switch {
	case mem == engine.DRAM, mem == engine.VRAM && a.config.HostVRAM:
		return nil
	case mem == engine.VRAM:
		return fmt.Errorf("VRAM needs NIXL, or AgentConfig.HostVRAM to use host memory in its place: %w: %w", engine.ErrUnsupported, engine.ErrNotFound)
	}
	return fmt.Errorf("memory of kind %d (storage needs NIXL): %w: %w", mem, engine.ErrUnsupported, engine.ErrNotFound)
}

// Register implements engine.Agent. It registers all of the regions or none. Regions may
// overlap. Of a region with FD, the agent keeps a descriptor of its own until the region
// is deregistered; that the memory at Addr is the file's at Off is the caller's word.
func (a *Agent) Register(mem engine.Mem, regions []engine.Region) error {
	if err := a.checkMem(mem); err != nil {
		return fmt.Errorf("embedded: register: %w", err)
	}
	made := make([]*localRegion, 0, len(regions))
	undo := func() {
		for _, r := range made {
			r.closeFD()
		}
	}
	for i, spec := range regions {
		r, err := a.newRegion(spec)
		if err != nil {
			undo()
			return fmt.Errorf("embedded: register region %d, %d bytes at %#x: %w", i, spec.Len, spec.Addr, err)
		}
		made = append(made, r)
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		undo()
		return fmt.Errorf("embedded: register: %w", err)
	}
	if len(made) > MaxRegions-len(a.byID) {
		undo()
		return fmt.Errorf("embedded: register: %d regions onto %d, an agent holds %d: %w", len(made), len(a.byID), MaxRegions, engine.ErrInvalidParam)
	}
	for _, r := range made {
		a.lastRegion++
		r.id = a.lastRegion
		a.byID[r.id] = r
		a.bySpan[r.span()] = append(a.bySpan[r.span()], r)
	}
	a.reindex()
	return nil
}

func (a *Agent) newRegion(spec engine.Region) (*localRegion, error) {
	if !validRange(spec.Addr, spec.Len) {
		return nil, fmt.Errorf("not a range of memory: %w", engine.ErrInvalidParam)
	}
	if spec.Dev != 0 && !a.config.HostVRAM {
		return nil, fmt.Errorf("device %d, host memory has device 0: %w", spec.Dev, engine.ErrInvalidParam)
	}
	r := &localRegion{addr: spec.Addr, n: spec.Len}
	if spec.FD < 0 {
		return r, nil
	}
	if err := checkSize(spec.FD, spec.Off, spec.Len); err != nil {
		return nil, fmt.Errorf("%w: %w", err, engine.ErrInvalidParam)
	}
	if checkShareable(spec.FD, spec.Off, spec.Len) != nil {
		return r, nil // the connection will do
	}
	fd, err := unix.FcntlInt(uintptr(spec.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor %d: %w: %w", spec.FD, err, engine.ErrBackend)
	}
	r.shared, r.fd, r.off = true, fd, spec.Off
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		r.closeFD()
		return nil, fmt.Errorf("descriptor %d: %w: %w", spec.FD, err, engine.ErrBackend)
	}
	r.dev, r.inode = uint64(st.Dev), st.Ino
	return r, nil
}

func (r *localRegion) closeFD() {
	if r.shared {
		unix.Close(r.fd)
	}
}

// reindex follows a change of byID. a.mu is held.
func (a *Agent) reindex() {
	regs := make([]*localRegion, 0, len(a.byID))
	for _, r := range a.byID {
		regs = append(regs, r)
	}
	slices.SortFunc(regs, func(x, y *localRegion) int { return cmp.Compare(x.id, y.id) })
	a.local.Store(newSpanIndex(regs, (*localRegion).span))
	a.epoch++
}

// region gives a registered region by its id, or nil.
func (a *Agent) region(id uint64) *localRegion {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.byID[id]
}

// LocalMetadata implements engine.Agent. Metadata is a snapshot: what is registered later
// is not in it, and a peer has to load newer metadata to reach that.
func (a *Agent) LocalMetadata() ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		return nil, fmt.Errorf("embedded: metadata: %w", err)
	}
	m := metadata{
		id: a.id, epoch: a.epoch, host: a.host, name: a.name, address: a.address, tcp: a.advertised,
		regions: make([]regionInfo, 0, len(a.byID)),
	}
	for _, r := range a.byID {
		m.regions = append(m.regions, regionInfo{id: r.id, addr: r.addr, n: r.n, shared: r.shared})
	}
	slices.SortFunc(m.regions, func(x, y regionInfo) int { return cmp.Compare(x.id, y.id) })
	return m.encode(), nil
}
