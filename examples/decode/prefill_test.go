package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// patience is longer than any of these tests takes on a healthy machine.
const patience = 60 * time.Second

// prefill is examples/prefill as a process of its own.
type prefill struct {
	t                  *testing.T
	cmd                *exec.Cmd
	prompts, bootstrap string
	ended              chan struct{} // closed with its standard error
}

var prefillDir string // of the program

func removePrefill() error { return os.RemoveAll(prefillDir) }

// buildPrefill builds the program once for all tests.
var buildPrefill = sync.OnceValues(func() (_ string, err error) {
	if prefillDir, err = os.MkdirTemp("", "nixlkv-prefill-"); err != nil {
		return "", err
	}
	bin := filepath.Join(prefillDir, "prefill")
	out, err := exec.Command("go", "build", "-o", bin, "../prefill").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return bin, nil
})

func startPrefill(t *testing.T, kind nixl.Kind) *prefill {
	t.Helper()
	bin, err := buildPrefill()
	if err != nil {
		t.Fatal(err)
	}
	s := testShape
	p := &prefill{t: t, ended: make(chan struct{})}
	p.cmd = exec.Command(bin, "-addr", "127.0.0.1:0", "-bootstrap", "127.0.0.1:0", "-engine", kind.String(),
		"-layers", fmt.Sprint(s.layers), "-pages", fmt.Sprint(s.pages), "-page-size", fmt.Sprint(s.pageSize), "-token-bytes", fmt.Sprint(s.tokenBytes))
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	serving := make(chan string, 1)
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			if _, fields, ok := strings.Cut(lines.Text(), "\tserving\t"); ok {
				serving <- fields
			}
		}
	}()
	t.Cleanup(p.kill)
	select {
	case fields := <-serving:
		var at struct{ Prompts, Bootstrap string }
		if err := json.Unmarshal([]byte(fields), &at); err != nil {
			t.Fatal(err)
		}
		p.prompts, p.bootstrap = "http://"+at.Prompts+"/prefill", at.Bootstrap
	case <-p.ended:
		t.Fatal("the prefill ended")
	case <-time.After(patience):
		t.Fatal("the prefill does not serve")
	}
	return p
}

func (p *prefill) kill() {
	if p.cmd.ProcessState != nil {
		return
	}
	_ = p.cmd.Process.Kill() // it may have ended, which Wait tells
	<-p.ended
	_ = p.cmd.Wait() // killed: that is all it can say
}
