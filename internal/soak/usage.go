package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// usage is what a process has of what is scarce.
type usage struct {
	resident   int64 // bytes
	files      int   // descriptors
	threads    int
	goroutines int // 0 if it is another process
}

func ownUsage() (usage, error) {
	u, err := usageOf("self")
	u.files-- // the one by which they were listed
	u.goroutines = runtime.NumGoroutine()
	return u, err
}

// usageOf reads what a process uses from /proc; process is its number, or "self".
func usageOf(process string) (u usage, err error) {
	status, err := os.ReadFile("/proc/" + process + "/status")
	if err != nil {
		return u, err
	}
	files, err := os.ReadDir("/proc/" + process + "/fd")
	if err != nil {
		return u, err
	}
	u.files = len(files)
	u.resident, u.threads, err = parseStatus(status)
	return u, err
}

var errStatus = errors.New("/proc/PID/status tells no VmRSS or Threads")

// parseStatus reads /proc/PID/status.
func parseStatus(status []byte) (resident int64, threads int, err error) {
	for lines := bufio.NewScanner(bytes.NewReader(status)); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch name {
		case "VmRSS":
			kib, err := strconv.ParseInt(strings.TrimSuffix(value, " kB"), 10, 50)
			if err != nil {
				return 0, 0, fmt.Errorf("%w: %w", errStatus, err)
			}
			resident = kib << 10
		case "Threads":
			if threads, err = strconv.Atoi(value); err != nil {
				return 0, 0, fmt.Errorf("%w: %w", errStatus, err)
			}
		}
	}
	if resident <= 0 || threads <= 0 {
		return 0, 0, errStatus
	}
	return resident, threads, nil
}

// exceeding says what there is more of than before. Threads are not compared: Go keeps those
// that it has.
func (u usage) exceeding(before usage) (more []string) {
	if n := u.goroutines - before.goroutines; n > 0 {
		more = append(more, fmt.Sprintf("%d goroutines", n))
	}
	if n := u.files - before.files; n > 0 {
		more = append(more, fmt.Sprintf("%d descriptors", n))
	}
	return more
}
