//go:build linux && cgo

package control

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
)

// status is the message that a prefill sends most.
func status() [][]byte { return frames("KV_STATUS", "1234567890123456789", "4", "0", "") }

func benchmarkPair(b *testing.B) (c *Control, to Endpoint, arrived chan struct{}) {
	b.Helper()
	arrived = make(chan struct{}, 1024)
	to = endpoint(b, start(b, Config{Handler: func([][]byte) { arrived <- struct{}{} }}))
	c = start(b, Config{})
	mustSend(b, c, to, "connect")
	<-arrived
	return c, to, arrived
}

// One message at a time, sent and received.
func BenchmarkSend(b *testing.B) {
	c, to, arrived := benchmarkPair(b)
	ctx := context.Background()
	m := Message{To: to, Frames: status()}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Send(ctx, m); err != nil {
			b.Fatal(err)
		}
		<-arrived
	}
}

// As many as the default limits on one endpoint allow to wait.
func BenchmarkSendAsync(b *testing.B) {
	for _, size := range []int{0, 4 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			c, to, arrived := benchmarkPair(b)
			window := make(chan struct{}, 512)
			done := func(_ uint64, err error) {
				if err != nil {
					b.Error(err)
				}
				<-window
			}
			m := Message{To: to, Frames: append(status(), make([]byte, size))}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			go func() {
				for range b.N {
					window <- struct{}{}
					if err := c.SendAsync(m, done); err != nil {
						b.Error(err)
					}
				}
			}()
			for range b.N {
				<-arrived
			}
		})
	}
}

// One busy endpoint among many that are connected and quiet.
func BenchmarkQuietEndpoints(b *testing.B) {
	for _, quiet := range []int{0, 64, 512} {
		b.Run(fmt.Sprint(quiet), func(b *testing.B) {
			c, to, arrived := benchmarkPair(b)
			for range quiet {
				mustSend(b, c, endpoint(b, start(b, Config{})), "hello")
			}
			ctx := context.Background()
			m := Message{To: to, Frames: status()}
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				if _, err := c.Send(ctx, m); err != nil {
					b.Fatal(err)
				}
				<-arrived
			}
		})
	}
}

// What it costs to ask libzmq where each message came from.
func BenchmarkSource(b *testing.B) {
	for _, asked := range []bool{false, true} {
		b.Run(fmt.Sprintf("asked=%t", asked), func(b *testing.B) {
			arrived := make(chan struct{}, 1024)
			cfg := Config{Handler: func([][]byte) { arrived <- struct{}{} }}
			if asked {
				cfg = Config{HandlerFrom: func(netip.Addr, [][]byte) { arrived <- struct{}{} }}
			}
			to := endpoint(b, start(b, cfg))
			c := start(b, Config{})
			mustSend(b, c, to, "connect")
			<-arrived
			window := make(chan struct{}, 512)
			done := func(_ uint64, err error) {
				if err != nil {
					b.Error(err)
				}
				<-window
			}
			m := Message{To: to, Frames: status()}
			b.ReportAllocs()
			b.ResetTimer()
			go func() {
				for range b.N {
					window <- struct{}{}
					if err := c.SendAsync(m, done); err != nil {
						b.Error(err)
					}
				}
			}()
			for range b.N {
				<-arrived
			}
		})
	}
}
