package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// claimStdout keeps standard output for events: what native libraries print there (UCX logs
// to it) goes to standard error from now on.
func claimStdout() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(unix.Stdout), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("keeping standard output: %w", err)
	}
	if err := unix.Dup3(unix.Stderr, unix.Stdout, 0); err != nil {
		return nil, fmt.Errorf("redirecting standard output: %w", err)
	}
	return os.NewFile(uintptr(fd), "stdout"), nil
}
