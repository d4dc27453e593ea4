package nixl

import (
	"errors"
	"fmt"
)

// File is n bytes at an offset of an open file, for the backends POSIX, GDS and GDS_MT. The
// file is the caller's: the descriptor stays open until the region is deregistered (an
// *os.File that nobody refers to any more is closed by the garbage collector). Descriptors
// of it have the descriptor as Dev and offsets in the file as Addr; they lie in what was
// registered, which may be more than the file has: writing makes it longer, reading fails.
//
// NIXL (src/plugins/posix): FILE_SEG, the descriptor in devId. That it opens a path itself,
// as releases from 1.3 can, is not used: an earlier one would take the number that stands
// for the path as a descriptor.
func File(fd int, off, n uint64) Region {
	return Region{mem: MemFile, addr: off, len: n, dev: uint64(fd)} // a negative one is refused by validate
}

// Object is the first n bytes of an object in an object store, by its key, for the backend
// OBJ. The caller gives it a number, which no other object registered at the same time has;
// descriptors of it have the number as Dev and offsets in the object as Addr.
//
// NIXL (src/plugins/obj): OBJ_SEG, the number in devId, the key in metaInfo.
func Object(key string, number, n uint64) Region {
	return Region{mem: MemObject, len: n, dev: number, meta: key}
}

// Block is n bytes at an offset of a block device, for the backend GUSLI. The device is the
// number that the backend's configuration gives it; descriptors have it as Dev, and byte
// offsets in the device as Addr. GUSLI wants more of its lists than other backends do: memory
// registered by the device's number, and in a list of several descriptors a first one that is
// room for its own bookkeeping. This package registers DRAM with device 0 alone.
//
// NIXL (src/plugins/gusli): BLK_SEG, the number in devId.
func Block(device, off, n uint64) Region {
	return Region{mem: MemBlock, addr: off, len: n, dev: device}
}

// Self gives the agent as the far side of its own transfers, which is how NIXL reaches
// storage: the local side is memory, the other one a list of MemFile, MemObject or MemBlock
// that the agent has registered, and a backend that serves both does the transfer. Write
// goes to the storage, Read comes from it. The Remote is always the same; it cannot be
// invalidated or notified, and lives as long as the agent. The embedded engine gives
// ErrUnsupported.
//
// A transfer that storage refuses fails with a Status, and loses no peer. NIXL's POSIX backend
// tells of short reads and of errors of the operating system in 1.5.1; its source of release
// 1.4 says success whatever the answer was.
func (a *Agent) Self() (*Remote, error) {
	if err := a.enter(); err != nil {
		return nil, a.fail("self", "", err)
	}
	defer a.leave()
	raw, err := a.raw.Self()
	if err != nil {
		return nil, a.fail("self", "", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.self == nil {
		a.self = &Remote{a: a, raw: raw, name: a.name, self: true}
	}
	return a.self, nil
}

// errStorage explains a transfer with storage that failed. No peer is lost by it.
var errStorage = errors.New("the storage backend failed (NIXL's log on standard error says why)")

// storageError gives the reason of a status of such a transfer. What the engine knows speaks
// of connections.
func storageError(st Status, err error) error {
	if err == nil && st >= 0 {
		return nil
	}
	if st >= 0 {
		return err
	}
	return fmt.Errorf("%w: %w", st, errStorage)
}
