package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/nixlkv/nixlkv"
)

var (
	// errCommand: a command that cannot be read.
	errCommand = errors.New("invalid command")
	// errUnknownCommand: no command of this role.
	errUnknownCommand = errors.New("unknown command")
)

// defaultPatience is how long a command waits for its room, as SGLang's peers do.
const defaultPatience = 6 * time.Second

// command carries out a line of input. What takes longer than a moment it leaves to a
// goroutine of d.
type command func(d *driver, line []byte) error

// commandTable has the commands of both roles and those of this rank's.
func (d *driver) commandTable() map[string]command {
	t := map[string]command{
		"expect": (*driver).expect,
		"stray":  (*driver).stray,
		"rooms": func(d *driver, _ []byte) error {
			d.events.emit(d.role.rooms())
			return nil
		},
	}
	maps.Copy(t, d.role.commands())
	return t
}

// parse reads a command's arguments.
func parse(line []byte, args any) error {
	if err := json.Unmarshal(line, args); err != nil {
		return fmt.Errorf("%w: %w", errCommand, err)
	}
	return nil
}

// roomArg gives the room that a command names.
func roomArg(room *nixlkv.Room) (nixlkv.Room, error) {
	if room == nil {
		return 0, fmt.Errorf("%w: no room", errCommand)
	}
	if *room > nixlkv.MaxRoom {
		return 0, fmt.Errorf("%w: room %d does not fit 63 bits", errCommand, *room)
	}
	return *room, nil
}

// seconds turns an argument into a duration.
func seconds(name string, s *float64, absent time.Duration) (time.Duration, error) {
	const most = 1e6
	switch {
	case s == nil:
		return absent, nil
	case math.IsNaN(*s) || *s < 0 || *s > most:
		return 0, fmt.Errorf("%w: %s is %v s", errCommand, name, *s)
	}
	return time.Duration(*s * float64(time.Second)), nil
}

// expect tells the digests of slots of this rank.
func (d *driver) expect(line []byte) error {
	var args struct {
		KV    []int32   `json:"kv_indices"`
		Aux   *int32    `json:"aux_index"`
		State [][]int32 `json:"state_indices"`
	}
	if err := parse(line, &args); err != nil {
		return err
	}
	kv, err := digest(d.mem.kv, args.KV)
	if err != nil {
		return fmt.Errorf("kv_indices: %w", err)
	}
	e := expectEvent{Event: "expect", KVSHA256: kv, StateSHA256: []string{}}
	if args.Aux != nil {
		aux, err := digest(d.mem.aux, []int32{*args.Aux})
		if err != nil {
			return fmt.Errorf("aux_index: %w", err)
		}
		e.AuxSHA256 = &aux
	}
	if len(args.State) > len(d.mem.state) {
		return fmt.Errorf("%w: %d state components, of %d", errCommand, len(args.State), len(d.mem.state))
	}
	for i, slots := range args.State {
		sum, err := digest(d.mem.state[i], slots)
		if err != nil {
			return fmt.Errorf("state_indices of component %d: %w", i, err)
		}
		e.StateSHA256 = append(e.StateSHA256, sum)
	}
	d.events.emit(e)
	return nil
}

// stray counts what lies outside of the named slots.
func (d *driver) stray(line []byte) error {
	var args struct {
		KV    []int32   `json:"kv_indices"`
		Aux   []int32   `json:"aux_indices"`
		State [][]int32 `json:"state_indices"`
	}
	if err := parse(line, &args); err != nil {
		return err
	}
	if len(args.State) > len(d.mem.state) {
		return fmt.Errorf("%w: %d state components, of %d", errCommand, len(args.State), len(d.mem.state))
	}
	n := stray(d.mem.kv, args.KV) + stray(d.mem.aux, args.Aux)
	for i, component := range d.mem.state {
		var but []int32
		if i < len(args.State) {
			but = args.State[i]
		}
		n += stray(component, but)
	}
	d.events.emit(strayEvent{Event: "stray", Bytes: n})
	return nil
}
