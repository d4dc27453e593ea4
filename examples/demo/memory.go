package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

var errNoMemory = errors.New("out of memory")

// checkMemory refuses what the machine cannot hold before any of it is touched: when pages
// run out the kernel rather kills a process than lets a call fail.
func checkMemory(need int64) error {
	have, ok := availableMemory(os.DirFS("/"))
	if ok && need > have {
		return fmt.Errorf("%w: this run needs %s and the machine has %s to give; use fewer -requests, -pages or -pool pages",
			errNoMemory, formatBytes(need), formatBytes(have))
	}
	return nil
}

// availableMemory says how much memory may still be used, where the system tells: what is
// free or can be freed, within the limit of the container (control group v2).
func availableMemory(root fs.FS) (int64, bool) {
	b, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, false
	}
	have, ok := memAvailable(b)
	if !ok {
		return 0, false
	}
	if limit, ok := readNumber(root, "sys/fs/cgroup/memory.max"); ok {
		have = min(have, limit)
	}
	return have, true
}

// memAvailable reads the bytes of the line MemAvailable of /proc/meminfo.
func memAvailable(meminfo []byte) (int64, bool) {
	for lines := bufio.NewScanner(bytes.NewReader(meminfo)); lines.Scan(); {
		rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:")
		if !ok {
			continue
		}
		kib, ok := strings.CutSuffix(strings.TrimSpace(rest), " kB")
		n, err := strconv.ParseUint(kib, 10, 50) // more would not fit as bytes
		return int64(n) << 10, ok && err == nil
	}
	return 0, false
}

// readNumber reads a file of one number. A control group without a limit says "max".
func readNumber(root fs.FS, name string) (int64, bool) {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil && n >= 0
}
