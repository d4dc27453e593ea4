package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

// pair gives a link of the prefill to a decode, and the decode's end of it.
func pair(t *testing.T, why func() error) (context.Context, *link, net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	ctx, fail := context.WithCancelCause(ctx)
	t.Cleanup(func() { fail(nil) })
	here, there := net.Pipe()
	t.Cleanup(func() { there.Close() })
	l := newLink(here, roleDecode, fail, why)
	t.Cleanup(func() { l.close(nil) })
	return ctx, l, there
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte(s)); err != nil {
		t.Fatal(err)
	}
}

func TestLinkReceives(t *testing.T) {
	ctx, l, there := pair(t, nil)
	write(t, there, `{"report":{"written":5,"zero":6}}`+"\n")
	m, err := l.receive(ctx, "report")
	if err != nil || m.Report == nil || *m.Report != (report{5, 6}) {
		t.Errorf("%+v, %v", m, err)
	}
}

// Whatever ends the link ends the run, with the reason.
func TestLinkFails(t *testing.T) {
	killed := errors.New("signal: killed")
	for name, c := range map[string]struct {
		says string
		why  func() error
		want string
	}{
		"closed":        {"", nil, "waiting for the decode's answer: the decode is gone (it closed the link)"},
		"killed":        {"", func() error { return killed }, "waiting for the decode's answer: the decode is gone (signal: killed)"},
		"not known why": {"", func() error { return nil }, "waiting for the decode's answer: the decode is gone (it closed the link)"},
		"half a line":   {`{"bye":`, nil, "waiting for the decode's answer: from the decode: message: unexpected EOF"},
		"failed":        {`{"failed":"no luck"}` + "\n", nil, "waiting for the decode's answer: the decode failed: no luck"},
		"garbage":       {"hello\n", nil, "waiting for the decode's answer: from the decode: message: invalid character 'h' looking for beginning of value"},
		"line too long": {strings.Repeat("x", maxLine), nil, "waiting for the decode's answer: the decode is gone (bufio.Scanner: token too long)"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, l, there := pair(t, c.why)
			write(t, there, c.says)
			there.Close()
			if _, err := l.receive(ctx, "answer"); err == nil || err.Error() != c.want {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

func TestLinkOutOfTurn(t *testing.T) {
	ctx, _, there := pair(t, nil)
	write(t, there, `{"report":{}}`+"\n"+`{"report":{}}`+"\n")
	<-ctx.Done()
	if err := context.Cause(ctx); err.Error() != "the decode sent a message out of turn" {
		t.Error(err)
	}
}

// After its bye the other end may go without failing the run.
func TestLinkBye(t *testing.T) {
	ctx, l, there := pair(t, nil)
	go func() {
		b := make([]byte, 64)
		n, _ := there.Read(b)
		if string(b[:n]) != `{"bye":true}`+"\n" {
			t.Errorf("the decode is told %q", b[:n])
		}
		there.Close()
	}()
	if err := l.bye(ctx); err != nil {
		t.Error(err)
	}
	if ctx.Err() != nil {
		t.Error(context.Cause(ctx))
	}
}

// A failure is told, unless it came from the other end.
func TestLinkTellsFailure(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"own":    {errors.New("out of luck"), `{"failed":"out of luck"}` + "\n"},
		"theirs": {&failedError{roleDecode, "x"}, ""},
		"lost":   {&lostError{roleDecode, errors.New("x")}, ""},
		"none":   {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, l, there := pair(t, nil)
			told := make(chan string)
			go func() {
				b := make([]byte, 256)
				n, _ := there.Read(b)
				told <- string(b[:n])
			}()
			l.close(c.err)
			if got := <-told; got != c.want {
				t.Errorf("told %q, want %q", got, c.want)
			}
		})
	}
}

func TestParseAddress(t *testing.T) {
	for s, want := range map[string]address{
		"127.0.0.1:7000":  {"tcp", "127.0.0.1:7000"},
		"127.1.2.3:0":     {"tcp", "127.1.2.3:0"},
		"[::1]:7000":      {"tcp", "[::1]:7000"},
		"localhost:7000":  {"tcp", "localhost:7000"},
		"unix:/tmp/demo":  {"unix", "/tmp/demo"},
		"unix:@demo":      {"unix", "@demo"},
		"":                {},
		"7000":            {},
		":7000":           {},
		"0.0.0.0:7000":    {},
		"192.0.2.1:7000":  {},
		"example.org:700": {},
		"unix:":           {},
		"unix:@":          {},
	} {
		got, err := parseAddress(s)
		if got != want || (err == nil) != (want != address{}) {
			t.Errorf("%q: %v, %v", s, got, err)
		}
		if err == nil && got.String() != s {
			t.Errorf("%q is written %q", s, got)
		}
	}
}
