package embedded

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// dialRetry is the pause before another try to connect to a peer whose backlog is full,
// which it is only while the peer is stopped or starved.
const dialRetry = 20 * time.Millisecond

var errOtherUser = errors.New("the other end belongs to another user")

// listenUnix opens a socket with a random abstract name.
func listenUnix() (*net.UnixListener, string, error) {
	var random [16]byte
	rand.Read(random[:])
	address := "@nixlkv-embedded-" + hex.EncodeToString(random[:])
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	return l, address, err
}

// dialUnix connects to an agent. It returns when it could, when nobody listens there, or
// when ctx ends.
func dialUnix(ctx context.Context, address string) (*connection, error) {
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "unix", address)
		if err == nil {
			conn := c.(*net.UnixConn)
			if err := sameUser(conn); err != nil {
				conn.Close()
				return nil, err
			}
			return newConnection(conn)
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		pause := time.NewTimer(dialRetry)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, ctx.Err()
		}
	}
}

// sameUser says whether the process at the other end has this one's user id.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return credErr
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: uid %d", errOtherUser, cred.Uid)
	}
	return nil
}

// fdReader reads a connection and keeps the descriptors that come with the bytes, in
// order. The kernel ends a read behind bytes that carry descriptors, so they are here
// before the frame they belong to is parsed, and few are ever kept.
type fdReader struct {
	conn *net.UnixConn
	oob  []byte
	fds  []int
}

// maxPendingFDs: the frame at hand has one, and perhaps the next.
const maxPendingFDs = 4

func newFDReader(c *net.UnixConn) *fdReader {
	return &fdReader{conn: c, oob: make([]byte, unix.CmsgSpace(4))}
}

// Read implements io.Reader.
func (f *fdReader) Read(p []byte) (int, error) {
	n, oobn, _, _, err := f.conn.ReadMsgUnix(p, f.oob)
	n = max(n, 0) // -1 with an error
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(f.oob[:oobn])
		if err != nil {
			return n, fmt.Errorf("%w: control message: %w", errProtocol, err)
		}
		for i := range msgs {
			if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				f.fds = append(f.fds, fds...)
			}
		}
		if len(f.fds) > maxPendingFDs {
			return n, fmt.Errorf("%w: %d descriptors at once", errProtocol, len(f.fds))
		}
	}
	return n, err
}

// take gives the oldest descriptor of this file, and drops those before it. It gives -1
// if there is none: the kernel dropped it because this process may open no more.
func (f *fdReader) take(dev, inode uint64) int {
	for i, fd := range f.fds {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil || uint64(st.Dev) != dev || st.Ino != inode {
			continue
		}
		for _, earlier := range f.fds[:i] {
			unix.Close(earlier)
		}
		f.fds = slices.Delete(f.fds, 0, i+1)
		return fd
	}
	return -1
}

// close closes the descriptors that nobody took.
func (f *fdReader) close() {
	for _, fd := range f.fds {
		unix.Close(fd)
	}
	f.fds = nil
}

// writeFD writes a frame that carries a descriptor.
func writeFD(c *net.UnixConn, frame []byte, fd int) error {
	n, _, err := c.WriteMsgUnix(frame, unix.UnixRights(fd), nil)
	if err == nil && n < len(frame) {
		_, err = c.Write(frame[n:])
	}
	return err
}
