//go:build linux && cgo

package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// wakeToken marks the poller's own eventfd among what is ready.
const wakeToken = 0

// poller waits for descriptors to become readable, for a deadline, or for a wake-up from
// another goroutine. Everything but wake belongs to one goroutine.
//
// It is an epoll instance that the Go runtime's own poller watches in turn, so that a waiting
// goroutine holds no thread. Descriptors are level-triggered.
type poller struct {
	epfd, wakefd int
	file, wakes  *os.File // own epfd and wakefd
	conn         syscall.RawConn
	until        time.Time // the read deadline that file has

	ready [64]unix.EpollEvent
	n     int
	err   error
	look  func(fd uintptr) bool // bound once: a method value made per wait would be allocated
}

func newPoller() (*poller, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("control: epoll_create1: %w", err)
	}
	// Only a non-blocking descriptor is given to the runtime's poller.
	if err := unix.SetNonblock(epfd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("control: epoll: %w", err), unix.Close(epfd))
	}
	wakefd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control: eventfd: %w", err), unix.Close(epfd))
	}
	p := &poller{
		epfd: epfd, file: os.NewFile(uintptr(epfd), "control-epoll"),
		wakefd: wakefd, wakes: os.NewFile(uintptr(wakefd), "control-wake"),
	}
	p.look = func(uintptr) bool {
		p.poll()
		return p.n > 0 || p.err != nil
	}
	p.conn, err = p.file.SyscallConn()
	if err == nil {
		// Fails if the runtime cannot watch the descriptor.
		err = p.file.SetReadDeadline(time.Time{})
	}
	if err == nil {
		err = p.watch(wakefd, wakeToken)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control: epoll: %w", err), p.close())
	}
	return p, nil
}

// watch has fd reported as token when it is readable.
func (p *poller) watch(fd int, token uint64) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(token), Pad: int32(token >> 32)}
	if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("control: epoll_ctl: %w", err)
	}
	return nil
}

// unwatch must come before fd is closed. The token can still be among what was ready.
func (p *poller) unwatch(fd int) error {
	if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, fd, nil); err != nil {
		return fmt.Errorf("control: epoll_ctl: %w", err)
	}
	return nil
}

func token(ev unix.EpollEvent) uint64 { return uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32 }

// wait gives what is ready, which is nothing at the deadline; the zero deadline is none. The
// slice is valid until the next wait. Wake-ups are cleared and reported as wakeToken.
func (p *poller) wait(until time.Time) ([]unix.EpollEvent, error) {
	if !until.Equal(p.until) {
		if err := p.file.SetReadDeadline(until); err != nil {
			return nil, fmt.Errorf("control: epoll: %w", err)
		}
		p.until = until
	}
	p.n, p.err = 0, nil
	if err := p.conn.Read(p.look); errors.Is(err, os.ErrDeadlineExceeded) {
		p.poll() // a deadline in the past must not hide what is ready
	} else if err != nil {
		return nil, fmt.Errorf("control: epoll: %w", err)
	}
	return p.take()
}

// peek is wait without waiting.
func (p *poller) peek() ([]unix.EpollEvent, error) {
	p.poll()
	return p.take()
}

// take gives what poll found.
func (p *poller) take() ([]unix.EpollEvent, error) {
	if p.err != nil {
		return nil, fmt.Errorf("control: epoll_wait: %w", p.err)
	}
	ready := p.ready[:p.n]
	for _, ev := range ready {
		if token(ev) == wakeToken {
			var count [8]byte
			if _, err := unix.Read(p.wakefd, count[:]); err != nil && err != unix.EAGAIN {
				return nil, fmt.Errorf("control: eventfd: %w", err)
			}
		}
	}
	return ready, nil
}

// poll looks what is ready.
func (p *poller) poll() {
	for {
		p.n, p.err = unix.EpollWait(p.epfd, p.ready[:], 0)
		if p.err != unix.EINTR {
			break
		}
	}
	p.n = max(p.n, 0)
}

// wake ends the current or the next wait. Any goroutine may call it, also after close.
func (p *poller) wake() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	// It can only fail once closed: the counter does not get near its limit.
	_, _ = p.wakes.Write(one[:])
}

func (p *poller) close() error { return errors.Join(p.file.Close(), p.wakes.Close()) }
