package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

const (
	roomTimeout  = 2 * time.Minute  // for a room, the first ones at 64 new peers included
	closeTimeout = 30 * time.Second // for a manager
	idleTimeout  = 40 * time.Second // for what is busy to become idle; longer than a release may take
	goneTimeout  = 5 * time.Second  // for goroutines to end behind those who ended them
)

// side is what a child runs.
type side interface {
	start()
	stop()
	counts() *tally
	report(*report) // what it holds, and what is busy
	close(context.Context) error
}

// child is a process of a run.
type child struct {
	config childConfig
	engine *nixl.Engine
	before usage // when there was an engine and nothing else
	side   side
	gone   time.Duration // goneTimeout, but for tests
}

// runChild does what it is told until it is told to close, or until nobody tells it anything.
func runChild(c childConfig, in io.Reader, out io.Writer) error {
	x := &child{config: c, gone: goneTimeout}
	answer := json.NewEncoder(out)
	first, err := x.open()
	if err != nil {
		return errors.Join(err, answer.Encode(report{Error: err.Error()}))
	}
	if err := answer.Encode(first); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Buffer(nil, maxLine); lines.Scan(); {
		r := report{}
		if err := x.do(lines.Text(), &r); err != nil {
			r = report{Error: err.Error()}
		}
		if err := answer.Encode(r); err != nil {
			return err
		}
		if lines.Text() == cmdClose {
			return nil
		}
	}
	return errors.New("whoever started this process is gone")
}

func (x *child) open() (r report, err error) {
	kind, err := parseKind(x.config.Plan.Engine)
	if err != nil {
		return r, err
	}
	if x.engine, err = nixl.Open(kind); err != nil {
		return r, err
	}
	// A first agent makes what an engine keeps for good.
	a, err := x.engine.NewAgent(fmt.Sprintf("first-%d", os.Getpid()))
	if err != nil {
		return r, err
	}
	if err := a.Close(); err != nil {
		return r, err
	}
	if x.before, err = ownUsage(); err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), roomTimeout)
	defer cancel()
	p := &x.config.Plan
	switch x.config.Role {
	case rolePrefill:
		f, err := newPrefill(ctx, p, x.engine)
		if err != nil {
			return r, err
		}
		x.side, r.Addr, r.Engine = f, f.addr(), x.engine.Info().Kind.String()
		if f.other != nil {
			r.Other = f.other.addr()
		}
	case roleDecode:
		x.side, err = newDecodes(ctx, p, x.config.Process, x.config.Addr, x.engine)
	case roleGuest:
		x.side, err = newGuests(p, x.config.Addr, x.config.Other, x.engine)
	default:
		err = fmt.Errorf("%w: a child that is a %q", errPlan, x.config.Role)
	}
	return r, err
}

func (x *child) do(line string, r *report) error {
	command, argument, _ := strings.Cut(line, " ")
	f, isPrefill := x.side.(*prefill)
	d, isDecodes := x.side.(*decodes)
	g, isGuest := x.side.(*guests)
	switch {
	case command == cmdStart && isDecodes && argument != "":
		var first []int
		if err := json.Unmarshal([]byte(argument), &first); err != nil {
			return fmt.Errorf("%w: %s: %w", errPlan, command, err)
		}
		if err := d.startAt(first); err != nil {
			return err
		}
	case command == cmdStart:
		x.side.start()
	case command == cmdGo && isDecodes:
		d.goOn()
	case command == cmdCount:
	case command == cmdSample:
		debug.FreeOSMemory()
	case command == cmdStop:
		x.side.stop()
		r.Left = x.untilIdle()
	case command == cmdClose:
		return x.close(r)
	case isPrefill && (command == cmdKilling || command == cmdKilled || command == cmdRevived):
		process, err := strconv.Atoi(argument)
		if err != nil || process < 0 || process >= len(f.lives) {
			return fmt.Errorf("%w: %s: decode process %q", errPlan, command, argument)
		}
		switch command {
		case cmdKilling:
			f.killing(process)
		case cmdKilled:
			f.killed(process, r)
			return nil
		case cmdRevived:
			f.begin(process)
		}
	case command == cmdCalm && isPrefill:
		r.Left = f.calm()
	case command == cmdAlone && isPrefill:
		r.Left = f.alone()
	case command == cmdVisit && isGuest:
		g.visit(&g.here)
	case command == cmdOther && isGuest:
		g.visit(&g.there)
	case command == cmdPass && isGuest:
		g.visit(nil)
	default:
		return fmt.Errorf("%w: command %q", errPlan, command)
	}
	t := x.side.counts()
	t.report(r)
	if command == cmdSample {
		x.side.report(r)
		r.Latency = t.latency.take()
	}
	r.Goroutines = runtime.NumGoroutine()
	return nil
}

// untilIdle waits until no room needs anything any more, and gives what still does.
func (x *child) untilIdle() (left []string) {
	return untilNone(idleTimeout, func() (left []string) {
		var r report
		x.side.report(&r)
		for _, name := range slices.Sorted(maps.Keys(r.Busy)) {
			if n := r.Busy[name]; n != 0 {
				left = append(left, fmt.Sprintf("%d %s after the last room", n, name))
			}
		}
		return left
	})
}

// close gives everything back and compares with what there was at first.
func (x *child) close(r *report) error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := x.side.close(ctx); err != nil {
		return err
	}
	if s := x.engine.Stats(); s.Agents != 0 {
		r.Left = append(r.Left, fmt.Sprintf("%d agents", s.Agents))
	}
	for end := time.Now().Add(x.gone); ; time.Sleep(10 * time.Millisecond) {
		now, err := ownUsage()
		if err != nil {
			return err
		}
		more := now.exceeding(x.before)
		if len(more) == 0 || time.Now().After(end) {
			r.Left = append(r.Left, more...)
			break
		}
	}
	return x.engine.Close()
}
