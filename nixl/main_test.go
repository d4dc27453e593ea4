package nixl

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is also the peer process of the tests that need one (peer_test.go).
func TestMain(m *testing.M) {
	if os.Getenv(envPeer) != "" {
		os.Exit(peerMain(os.Stdin, os.Stdout))
	}
	goleak.VerifyTestMain(m)
}
