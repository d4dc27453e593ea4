package embedded

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
)

// childEnv holds the role of a child process, as JSON. A child is this test binary; it
// obeys one command a line on standard input and answers each with one line.
const childEnv = "NIXLKV_EMBEDDED_CHILD"

type childRole struct {
	Name   string
	Params map[string]string // of the backend
}

// child is an agent in another process.
type child struct {
	*spawn.Process
	t   testing.TB
	out *bufio.Reader // of its standard output
}

// child starts a process with an agent of this name.
func (k wayKind) child(t testing.TB, name string) *child {
	t.Helper()
	return startChild(t, exec.Command(os.Args[0]), name, k.params)
}

// startChild starts a process with an agent of this name, by a command that runs this binary.
func startChild(t testing.TB, cmd *exec.Cmd, name string, params map[string]string) *child {
	t.Helper()
	role, err := json.Marshal(childRole{name, params})
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), childEnv+"="+string(role))
	p := spawn.Start(t, cmd)
	return &child{p, t, bufio.NewReaderSize(p.Stdout, 1<<20)}
}

// send gives a command; answer reads what came of it.
func (c *child) send(args ...any) {
	c.t.Helper()
	if _, err := io.WriteString(c.Stdin, fmt.Sprintln(args...)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) answer() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("child: %q, %v", line, err)
	}
	text, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "ok ")
	if !ok {
		c.t.Fatalf("child: %s", line)
	}
	return text
}

func (c *child) do(args ...any) string {
	c.t.Helper()
	c.send(args...)
	return c.answer()
}

func (c *child) number(args ...any) uint64 {
	c.t.Helper()
	n, err := strconv.ParseUint(c.do(args...), 10, 64)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

func (c *child) metadata() []byte {
	c.t.Helper()
	md, err := hex.DecodeString(c.do("metadata"))
	if err != nil {
		c.t.Fatal(err)
	}
	return md
}

// childAgent is what a child process has.
type childAgent struct {
	a   *Agent
	mem *memory
	// Commands about a peer are about the one that was chosen last.
	peers map[string]*childPeer
	*childPeer
}

// childPeer is a peer of a child.
type childPeer struct {
	remote engine.Remote
	req    engine.Request
	stop   chan struct{}
	loop   chan string
}

func runChild(env string) error {
	var role childRole
	if err := json.Unmarshal([]byte(env), &role); err != nil {
		return err
	}
	made, err := New(WithReleaseTimeout(patience)).NewAgent(role.Name, engine.AgentConfig{})
	if err != nil {
		return err
	}
	c := &childAgent{a: made.(*Agent), childPeer: &childPeer{}, peers: map[string]*childPeer{}}
	if _, err := c.a.CreateBackend("EMBEDDED", role.Params); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		answer, err := c.obey(strings.Fields(lines.Text()))
		if err != nil {
			fmt.Println("error", err)
			continue
		}
		fmt.Println("ok", answer)
	}
	return lines.Err()
}

func (c *childAgent) obey(args []string) (string, error) {
	number := func(i int) uint64 {
		n, _ := strconv.ParseUint(args[i], 10, 64)
		return n
	}
	switch args[0] {
	case "memory": // kind size
		mk := newShared
		if args[1] == "foreign" {
			mk = newForeign
		}
		m, err := mk(int(number(2)))
		if err != nil {
			return "", err
		}
		c.mem = m
		return fmt.Sprint(m.addr()), c.a.Register(engine.DRAM, []engine.Region{m.region()})
	case "metadata":
		md, err := c.a.LocalMetadata()
		return hex.EncodeToString(md), err
	case "sum":
		return fmt.Sprint(crc32.ChecksumIEEE(c.mem.data)), nil
	case "fill": // seed
		fill(c.mem.data, number(1))
		return "", nil
	case "notes": // count
		return c.notes(int(number(1)))
	case "deregister":
		return "", c.a.Deregister(engine.DRAM, []engine.Region{c.mem.region()})
	case "destroy":
		return "", c.a.Destroy()
	case "inbound":
		return fmt.Sprint(c.a.Stats().Inbound), nil
	case "peer": // name
		p := c.peers[args[1]]
		if p == nil {
			p = &childPeer{}
			c.peers[args[1]] = p
		}
		c.childPeer = p
		return "", nil
	case "lost": // waits for the loss of the peer
		return "", spin("loss of the peer", func() bool { return errors.Is(c.a.CheckRemote(c.remote), engine.ErrPeerLost) })
	case "load": // metadata
		md, err := hex.DecodeString(args[1])
		if err != nil {
			return "", err
		}
		var name string
		c.remote, name, err = c.a.LoadRemote(md)
		return name, err
	case "write", "read": // address page: all of the memory, once
		op := engine.Write
		if args[0] == "read" {
			op = engine.Read
		}
		if err := c.request(op, number(1), int(number(2))); err != nil {
			return "", err
		}
		return c.post(c.req)
	case "flood": // address page: over and over, until it fails
		if err := c.request(engine.Write, number(1), int(number(2))); err != nil {
			return "", err
		}
		c.flood(c.childPeer)
		return "", nil
	case "ended": // of the flood
		return <-c.loop, nil
	case "stop":
		close(c.stop)
		return <-c.loop, nil
	}
	return "", fmt.Errorf("no command %q", args)
}

// flood returns after the first transfer.
func (c *childAgent) flood(p *childPeer) {
	p.stop, p.loop = make(chan struct{}), make(chan string, 1)
	first := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			select {
			case <-p.stop:
				p.loop <- "stopped"
				return
			default:
			}
			why, err := c.post(p.req)
			if n == 0 {
				close(first)
			}
			if err != nil || why != "" {
				p.loop <- fmt.Sprint(why, err)
				return
			}
		}
	}()
	<-first
}

func (c *childAgent) request(op engine.Op, addr uint64, page int) error {
	var lists [2]engine.List
	for i, descs := range [][]engine.Desc{c.mem.pages(page), pagesAt(addr, len(c.mem.data), page)} {
		l, err := c.a.NewList(engine.DRAM)
		if err != nil {
			return err
		}
		if err := c.a.Append(l, descs); err != nil {
			return err
		}
		lists[i] = l
	}
	var err error
	c.req, _, err = c.a.Create(&engine.Spec{
		Op: op, Remote: c.remote, LocalList: lists[0], RemoteList: lists[1],
		NoMerge: true, Notif: []byte("written"), HasNotif: true,
	})
	return err
}

// post gives why the transfer failed, or "".
func (c *childAgent) post(r engine.Request) (string, error) {
	if _, err := c.a.Post(r, nil, false); err != nil {
		return err.Error(), nil
	}
	if err := spin("the end of a request", func() bool { return poll(c.a, r) != engine.InProgress }); err != nil {
		return "", err
	}
	switch err := c.a.Reason(r); {
	case errors.Is(err, engine.ErrNotRegistered):
		return "not registered", nil
	case errors.Is(err, engine.ErrPeerLost):
		return "peer lost", nil
	case err != nil:
		return err.Error(), nil
	}
	return "", nil
}

func (c *childAgent) notes(n int) (string, error) {
	var got []string
	var buf engine.Notifications
	for end := time.Now().Add(patience); len(got) < n; {
		if time.Now().After(end) {
			return "", fmt.Errorf("%d notifications, want %d", len(got), n)
		}
		if err := c.a.Notifications(&buf); err != nil {
			return "", err
		}
		for from, msg := range buf.All() {
			got = append(got, fmt.Sprintf("%s:%s", from, msg))
		}
	}
	return strings.Join(got, " "), nil
}
