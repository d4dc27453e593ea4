package embedded

import "sync"

// uses counts what uses a region: peers that have it mapped, copies from or to
// connections, and requests of the agent itself. It can be shut against new ones.
type uses struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // while shut; closed once n is zero
}

// acquire adds a use, unless the region is shut.
func (u *uses) acquire() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.idle != nil {
		return false
	}
	u.n++
	return true
}

func (u *uses) release() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n--
	if u.n == 0 && u.idle != nil {
		close(u.idle)
	}
}

// shut refuses new uses from now on. The channel closes when no use is left; it is nil if
// the region is already shut.
func (u *uses) shut() <-chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.idle != nil {
		return nil
	}
	u.idle = make(chan struct{})
	if u.n == 0 {
		close(u.idle)
	}
	return u.idle
}

// reopen undoes shut.
func (u *uses) reopen() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.idle = nil
}
