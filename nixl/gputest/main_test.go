//go:build gpu && linux

package gputest

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is also the peer process of the tests that need one (peer_test.go).
func TestMain(m *testing.M) {
	if config, ok := os.LookupEnv(envPeer); ok {
		os.Exit(peerMain(config, os.Stdin, os.Stdout))
	}
	goleak.VerifyTestMain(m)
}
