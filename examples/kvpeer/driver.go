package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/nixlkv/nixlkv"
)

// maxLine bounds a command.
const maxLine = 16 << 20

// driver carries out commands.
type driver struct {
	cfg      *config
	mem      *memory
	role     role
	events   *events
	commands map[string]command

	ctx    context.Context // ends the work of commands
	cancel context.CancelFunc
	work   sync.WaitGroup
}

func newDriver(cfg *config, mem *memory, r role, ev *events) *driver {
	d := &driver{cfg: cfg, mem: mem, role: r, events: ev}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.commands = d.commandTable()
	return d
}

// serve carries out the commands of in until one says exit or in ends.
func (d *driver) serve(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		if d.do(lines.Bytes()) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading commands: %w", err)
	}
	return nil
}

// do carries out a line. It says whether the line was the last one.
func (d *driver) do(line []byte) (last bool) {
	// The room is read by itself, so that whatever is wrong with the rest can be told of it.
	var head struct {
		Cmd  string       `json:"cmd"`
		Room *nixlkv.Room `json:"room"`
	}
	err := json.Unmarshal(line, &head)
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %w", errCommand, err)
	case head.Cmd == "exit":
		return true
	case d.commands[head.Cmd] == nil:
		names := append(slices.Collect(maps.Keys(d.commands)), "exit")
		slices.Sort(names)
		err = fmt.Errorf("%w: %q of a %s, which has %v", errUnknownCommand, head.Cmd, d.cfg.Role, names)
	default:
		err = d.commands[head.Cmd](d, line)
	}
	if err != nil {
		d.events.exception(head.Room, err)
	}
	return false
}

// spawn runs the rest of a command beside the others. An error that it gives is one that
// was not expected; after the driver has ended, none is.
func (d *driver) spawn(room *nixlkv.Room, f func(ctx context.Context) error) {
	d.work.Add(1)
	go func() {
		defer d.work.Done()
		if err := f(d.ctx); err != nil && d.ctx.Err() == nil {
			d.events.exception(room, err)
		}
	}()
}

// close ends what commands have begun, then the rank.
func (d *driver) close() error {
	d.cancel()
	d.work.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return d.role.close(ctx)
}
