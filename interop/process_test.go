package interop

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
)

const (
	// startPatience is how long a rank may take to be ready; a loaded machine is slow to load
	// NIXL.
	startPatience = 90 * time.Second
	// exitPatience is how long it may take to exit.
	exitPatience = 20 * time.Second
	// tailLines of a rank's log are shown when a test fails.
	tailLines = 15
)

// event is what a rank tells; the fields that an event does not have are zero.
type event struct {
	Event  string  `json:"event"`
	Room   *uint64 `json:"room"`
	Status string  `json:"status"`

	Error   string `json:"error"`
	Message string `json:"message"`

	KVSHA256    string   `json:"kv_sha256"`
	AuxSHA256   string   `json:"aux_sha256"`
	StateSHA256 []string `json:"state_sha256"`

	DecodePrefixLen int `json:"decode_prefix_len"`
	Bytes           int `json:"bytes"`

	RankPort int    `json:"rank_port"`
	LocalIP  string `json:"local_ip"`
	Agent    string `json:"agent"`

	Confirmed bool `json:"confirmed"`

	RequestStatus map[string]string `json:"request_status"`
	Failures      map[string]string `json:"failures"`
	Peers         []string          `json:"peers"`
	Held          int               `json:"held"`
	Asked         []uint64          `json:"asked"`
}

// about says whether the event is about a room, or about none.
func (e event) about(room uint64) bool { return e.Room == nil || *e.Room == room }

// process is a rank, as a process of its own.
type process struct {
	proc   *spawn.Process
	name   string
	ours   bool          // this library's, not SGLang's
	log    string        // path
	exited chan struct{} // closed when the process has ended and everything it told is here

	mu      sync.Mutex
	events  []event       // told and not taken
	changed chan struct{} // closed and replaced at every event

	ready event
}

// startRank starts a rank, which ends with the test. dir is for its files; the pipeline stages
// of SGLang find each other there.
func startRank(t *testing.T, env environment, by impl, dir, name string, c rankConfig) *process {
	t.Helper()
	if r := by.sglang; r != nil {
		c.Source, c.Version = r.Src, r.String()
	}
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name+".json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	p := &process{name: fmt.Sprintf("%s (%v)", name, by), ours: by.sglang == nil, log: filepath.Join(dir, name+".log"),
		exited: make(chan struct{}), changed: make(chan struct{})}
	args := []string{env.kvpeer, "-engine", by.engine.String(), path}
	if !p.ours {
		args = []string{env.python, "../testdata/peer/sglang_peer.py", path}
	}
	cmd := exec.Command(args[0], args[1:]...)
	if c.host != nil {
		// UCX finds network devices in /sys, which shows those of the namespace that mounted it.
		cmd = c.host.Command(append([]string{"unshare", "--mount",
			"sh", "-c", `mount -t sysfs none /sys && exec "$@"`, "sh"}, args...)...)
	}
	cmd.Env = append(os.Environ(),
		// Proxies are for the world outside; SGLang would ask them for its neighbours.
		"no_proxy=*", "NO_PROXY=*",
		// Each module is compiled once for all ranks, and not beside its source.
		"PYTHONDONTWRITEBYTECODE=", "PYTHONPYCACHEPREFIX="+filepath.Join(scratch, "pycache"),
		// The race detector sleeps for a second before a program exits, for reports to come; the
		// goroutines of kvpeer have ended by then.
		"GORACE="+strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	log, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stderr = log
	p.proc = spawn.Start(t, cmd)
	go p.read()
	t.Cleanup(func() { p.end(t) })
	return p
}

// read reads the process's events until it ends.
func (p *process) read() {
	lines := bufio.NewScanner(p.proc.Stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			e = event{Event: "exception", Error: "no event", Message: lines.Text()}
		}
		p.told(e)
	}
	_, _ = io.Copy(io.Discard, p.proc.Stdout)
	<-p.proc.Exited
	close(p.exited)
}

func (p *process) told(e event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = append(p.events, e)
	close(p.changed)
	p.changed = make(chan struct{})
}

// tell sends a command.
func (p *process) tell(t *testing.T, command map[string]any) {
	t.Helper()
	b, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.proc.Stdin.Write(append(b, '\n')); err != nil {
		t.Fatalf("%s does not take commands: %v", p.name, err)
	}
}

// take waits for an event that is wanted and takes it.
func (p *process) take(ctx context.Context, what string, wanted func(event) bool) (event, error) {
	for ended := false; ; {
		p.mu.Lock()
		changed := p.changed
		i := slices.IndexFunc(p.events, wanted)
		if i >= 0 {
			e := p.events[i]
			p.events = slices.Delete(p.events, i, i+1)
			p.mu.Unlock()
			return e, nil
		}
		p.mu.Unlock()
		if ended {
			return event{}, fmt.Errorf("%s ended (%v) before it told %s", p.name, p.proc.State(), what)
		}
		select {
		case <-changed:
		case <-p.exited:
			ended = true // it may have told something last
		case <-ctx.Done():
			return event{}, fmt.Errorf("%s did not tell %s: %w", p.name, what, context.Cause(ctx))
		}
	}
}

// takeOf takes the next event of a name, or about a room what the rank did not expect.
func (p *process) takeOf(ctx context.Context, name string, room *uint64) (event, error) {
	what := name
	if room != nil {
		what = fmt.Sprintf("%s of room %d", name, *room)
	}
	e, err := p.take(ctx, what, func(e event) bool {
		return (e.Event == name || e.Event == "exception") && (room == nil || e.about(*room))
	})
	if err == nil && e.Event != name {
		err = fmt.Errorf("%s did not tell %s but %s: %s", p.name, what, e.Error, e.Message)
	}
	return e, err
}

// forget drops what is left of a case, whose room numbers may come again.
func (p *process) forget(c *testCase) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = slices.DeleteFunc(p.events, func(e event) bool {
		return slices.ContainsFunc(c.rooms, func(r room) bool { return e.Room != nil && *e.Room == r.number })
	})
}

// ask sends a command and gives its answer.
func (p *process) ask(t *testing.T, answer string, command map[string]any) event {
	t.Helper()
	p.tell(t, command)
	ctx, cancel := context.WithTimeout(t.Context(), exitPatience)
	defer cancel()
	e, err := p.takeOf(ctx, answer, nil)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// askUntil asks again and again until an answer is the one.
func (p *process) askUntil(t *testing.T, what, answer string, command map[string]any, is func(event) bool) event {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		e := p.ask(t, answer, command)
		if is(e) {
			return e
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not after %v: %s; %+v", p.name, patience, what, e)
		}
	}
}

// waitReady waits until the rank takes commands.
func (p *process) waitReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startPatience)
	defer cancel()
	e, err := p.takeOf(ctx, "ready", nil)
	if err != nil {
		t.Fatal(err)
	}
	p.ready = e
}

// exitAll asks ranks to exit, and fails the test unless all do so with code 0.
func exitAll(t *testing.T, ranks ...*process) {
	t.Helper()
	for _, p := range ranks {
		p.tell(t, map[string]any{"cmd": "exit"})
	}
	late := time.After(exitPatience)
	for _, p := range ranks {
		select {
		case <-p.exited:
		case <-late:
			t.Fatalf("%s has not exited after %v", p.name, exitPatience)
		}
		if code := p.proc.State().ExitCode(); code != 0 {
			t.Errorf("%s exited with %v", p.name, p.proc.State())
		}
	}
}

// hasEnded says whether the process has.
func (p *process) hasEnded() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// pause stops the process where it is, until the function that it gives is called.
func (p *process) pause(t *testing.T) (resume func()) {
	t.Helper()
	p.proc.Stop(t)
	return func() { p.proc.Continue(t) }
}

// kill ends the rank without asking it.
func (p *process) kill() {
	p.proc.Kill()
	<-p.exited
}

// end kills what has not exited, and shows the end of the log if the test has failed.
func (p *process) end(t *testing.T) {
	_ = p.proc.Stdin.Close()
	p.kill()
	if !t.Failed() {
		return
	}
	b, err := os.ReadFile(p.log)
	if err != nil {
		t.Log(err)
		return
	}
	lines := slices.Collect(strings.Lines(string(bytes.TrimSpace(b))))
	t.Logf("log of %s, %d lines, the last ones:\n%s", p.name, len(lines), strings.Join(lines[max(0, len(lines)-tailLines):], ""))
}
