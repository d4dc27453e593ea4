package spawn

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// line has cat give a line back.
func line(t *testing.T, p *Process, out *bufio.Reader) {
	t.Helper()
	if _, err := io.WriteString(p.Stdin, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if s, err := out.ReadString('\n'); s != "hello\n" || err != nil {
		t.Fatalf("read %q, %v", s, err)
	}
}

func TestStopAndContinue(t *testing.T) {
	p := Start(t, exec.Command("cat"))
	p.Limit(t, time.Minute)
	out := bufio.NewReader(p.Stdout)
	line(t, p, out)
	p.Stop(t)
	p.Stop(t) // it stands still already
	p.Continue(t)
	line(t, p, out)
	p.Finish(t, time.Minute)
	if !p.State().Success() {
		t.Error(p.State())
	}
}

// What a program has written last can be read when it has ended.
func TestLastWords(t *testing.T) {
	p := Start(t, exec.Command("sh", "-c", "echo bye; exit 3"))
	<-p.Exited
	if b, err := io.ReadAll(p.Stdout); string(b) != "bye\n" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
	if code := p.State().ExitCode(); code != 3 {
		t.Errorf("exit code %d", code)
	}
	p.Kill() // which does nothing any more
}

func TestLimit(t *testing.T) {
	p := Start(t, exec.Command("cat"))
	p.Limit(t, time.Millisecond)
	if _, err := p.Stdout.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read: %v", err)
	}
	if s := p.State().Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGKILL {
		t.Errorf("ended with %v", p.State())
	}
}

// asHolder makes TestKilledTests the tests that are killed.
const asHolder = "SPAWN_TEST_HOLDER"

// A program does not outlive tests that are killed.
func TestKilledTests(t *testing.T) {
	if os.Getenv(asHolder) != "" {
		p := Start(t, exec.Command("sh", "-c", "echo $$; exec sleep 600"))
		if _, err := io.Copy(os.Stdout, p.Stdout); err != nil {
			t.Error(err)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledTests$")
	cmd.Env = append(os.Environ(), asHolder+"=1")
	holder := Start(t, cmd)
	holder.Limit(t, time.Minute)
	s, err := bufio.NewReader(holder.Stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil {
		t.Fatal(err)
	}
	holder.Kill()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(time.Minute); !ended(t, pid); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("process %d is still there", pid)
		}
	}
}

// ended says whether a process has: it is gone, or nobody has asked yet how it ended.
func ended(t *testing.T, pid int) bool {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
	return err != nil || strings.Contains(string(stat), ") Z")
}
