package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"
)

// commandTimeout bounds the answer to a command: stopping may wait for a room and then for
// what is busy.
const commandTimeout = roomTimeout + idleTimeout + closeTimeout

// process is a child, as its parent sees it.
type process struct {
	name    string
	cmd     *exec.Cmd
	in      io.WriteCloser
	reports chan report // closed at the end of its output
	exited  chan struct{}
	err     error // how it ended; read after exited
}

// shared is a writer that many children write to.
type shared struct {
	mu sync.Mutex
	w  io.Writer
}

func (s *shared) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(b)
}

// spawn starts this program again, as a child, and waits until it is ready.
func spawn(name string, c childConfig, log *shared) (*process, report, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, report{}, err
	}
	config, err := json.Marshal(c)
	if err != nil {
		return nil, report{}, err
	}
	p := &process{name: name, cmd: exec.Command(exe, childFlag, string(config)), reports: make(chan report), exited: make(chan struct{})}
	p.cmd.Stderr = log
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, report{}, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, report{}, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, report{}, err
	}
	go p.read(out)
	r, err := p.answer()
	if err != nil {
		p.kill()
		return nil, r, err
	}
	return p, r, nil
}

func (p *process) read(out io.Reader) {
	defer close(p.exited)
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var r report
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			r = report{Error: fmt.Sprintf("%v in %q", err, lines.Text())}
		}
		p.reports <- r
	}
	close(p.reports)
	p.err = errors.Join(lines.Err(), p.cmd.Wait())
}

var errChild = errors.New("child")

// answer waits for the answer to a command.
func (p *process) answer() (report, error) {
	timeout := time.NewTimer(commandTimeout)
	defer timeout.Stop()
	select {
	case r, ok := <-p.reports:
		switch {
		case !ok:
			<-p.exited
			return r, fmt.Errorf("%w %s has ended: %v", errChild, p.name, p.err)
		case r.Error != "":
			return r, fmt.Errorf("%w %s: %s", errChild, p.name, r.Error)
		}
		return r, nil
	case <-timeout.C:
		return report{}, fmt.Errorf("%w %s has not answered within %v", errChild, p.name, commandTimeout)
	}
}

func (p *process) do(command string) (report, error) {
	if _, err := io.WriteString(p.in, command+"\n"); err != nil {
		return report{}, fmt.Errorf("%w %s: %w", errChild, p.name, err)
	}
	return p.answer()
}

func (p *process) usage() (usage, error) { return usageOf(strconv.Itoa(p.cmd.Process.Pid)) }

// wait waits for the end of a child that was told to close.
func (p *process) wait() error {
	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	select {
	case <-p.exited:
		if p.err != nil {
			return fmt.Errorf("%w %s: %w", errChild, p.name, p.err)
		}
		return nil
	case <-timeout.C:
		return fmt.Errorf("%w %s does not end", errChild, p.name)
	}
}

// kill ends a child, whatever it does, if it has not ended.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	go func() {
		for range p.reports { // read must not wait for anybody
		}
	}()
	<-p.exited
}
