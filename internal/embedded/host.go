package embedded

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hostID says where an agent can be reached from: a booted kernel, and in it the network
// namespace, because abstract socket names belong to one.
type hostID struct {
	boot     [16]byte // the kernel's random id of this boot
	netDev   uint64
	netInode uint64
}

func readHost() (hostID, error) {
	var h hostID
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return h, fmt.Errorf("cannot tell which host this is: %w", err)
	}
	digits := bytes.ReplaceAll(bytes.TrimSpace(text), []byte("-"), nil)
	if n, err := hex.Decode(h.boot[:], digits[:min(len(digits), 2*len(h.boot))]); err != nil || n != len(h.boot) {
		return h, fmt.Errorf("cannot tell which host this is: boot id %q", text)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		return h, fmt.Errorf("cannot tell the network namespace: %w", err)
	}
	h.netDev, h.netInode = uint64(st.Dev), st.Ino
	return h, nil
}

// differs says in words why an agent on h cannot reach one on peer, or "".
func (h hostID) differs(peer hostID) string {
	switch {
	case h.boot != peer.boot:
		return "it is on another host, or the host was rebooted since"
	case h.netDev != peer.netDev || h.netInode != peer.netInode:
		return "it is in another network namespace"
	}
	return ""
}
