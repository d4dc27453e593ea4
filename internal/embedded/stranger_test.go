package embedded

import (
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// TestStrangers: few of those who have not said yet which agent they mean are borne over
// TCP. Those who have do not count.
func TestStrangers(t *testing.T) {
	b := tcpKind.agent(t, "b", engine.AgentConfig{})
	a := tcpKind.agent(t, "a", engine.AgentConfig{})
	known := greet(t, b)
	strangers := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.strangers
	}
	eventually(t, "the first greeting", func() bool { return strangers() == 0 })
	var silent []*rawConn
	for range maxStrangers {
		silent = append(silent, dialRaw(t, b))
	}
	eventually(t, "their arrival", func() bool { return strangers() == maxStrangers })
	dialRaw(t, b).wantClosed()
	if got := b.Stats(); got.Refused != 1 || got.Inbound != maxStrangers+1 {
		t.Fatalf("stats %+v", got)
	}
	// Who is known is served.
	known.send(frame(frameCommit, 0, 1, nil))
	known.wantFrame(frameDone)
	// One goes, and there is room for one.
	silent[0].conn.Close()
	eventually(t, "the end of one", func() bool { return strangers() == maxStrangers-1 })
	if err := a.Connect(load(t, a, b)); err != nil {
		t.Fatal(err)
	}
	if n := strangers(); n != maxStrangers-1 {
		t.Fatalf("%d strangers", n)
	}
}

// TestSilentStranger is not waited for long.
func TestSilentStranger(t *testing.T) {
	soon := func(c *config) { c.strangerWait = 20 * time.Millisecond }
	b := tcpKind.agent(t, "b", engine.AgentConfig{}, soon)
	raw := dialRaw(t, b)
	raw.send(hello{to: b.id, name: "raw"}.append(nil)[:headerSize+3])
	raw.wantClosed()
	eventually(t, "its end", func() bool { return b.Stats().Inbound == 0 })
}

// TestLateFrame: what is large has to be asked for by somebody who is known.
func TestLateFrame(t *testing.T) {
	b := tcpKind.agent(t, "b", engine.AgentConfig{})
	raw := dialRaw(t, b)
	raw.send(appendHeader(nil, frameCommit, flagNotification, 1, MaxNotification))
	raw.wantClosed()
	eventually(t, "counting", func() bool { return b.Stats().Dropped == 1 })
}
