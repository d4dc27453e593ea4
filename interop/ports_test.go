package interop

import (
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
)

// ports hands out TCP ports for servers that cannot choose one themselves. They lie below the
// range that the system hands out by itself (net.ipv4.ip_local_port_range), where any
// connection of another process could take one before its server is up.
type ports struct {
	mu   sync.Mutex
	next int
}

const (
	firstPort = 20000
	portCount = 12000
)

var freePorts = ports{next: os.Getpid() * 97 % portCount}

// take gives a port of the loopback that nobody listens on, and that was not given before.
func (p *ports) take(t *testing.T) int {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for range portCount {
		port := firstPort + p.next
		p.next = (p.next + 1) % portCount
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		return port
	}
	t.Fatal("no free port")
	return 0
}
