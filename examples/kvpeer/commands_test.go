package main

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"

	"github.com/nixlkv/nixlkv/kvreceiver"
)

// noRole has no commands of its own.
type noRole struct{}

func (noRole) ready() readyEvent            { return readyEvent{Event: "ready"} }
func (noRole) commands() map[string]command { return nil }
func (noRole) rooms() roomsEvent            { return roomsEvent{Event: "rooms"} }
func (noRole) close(context.Context) error  { return nil }

// FuzzCommands: whatever the line, the answer is one event, or the end.
func FuzzCommands(f *testing.F) {
	f.Add([]byte(`{"cmd":"expect","kv_indices":[1,2],"aux_index":0,"state_indices":[[1]]}`))
	f.Add([]byte(`{"cmd":"expect","kv_indices":[2147483647]}`))
	f.Add([]byte(`{"cmd":"stray","kv_indices":[-1,64],"state_indices":[null]}`))
	f.Add([]byte(`{"cmd":"rooms","room":18446744073709551615}`))
	f.Add([]byte(`{"cmd":"exit"}`))
	f.Add([]byte(`{"cmd":5}`))
	c, err := parseConfig([]byte(prefillConfig("")))
	if err != nil {
		f.Fatal(err)
	}
	m, err := newMemory(c)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := m.free(); err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, line []byte) {
		var out bytes.Buffer
		d := newDriver(c, m, noRole{}, newEvents(&out))
		defer d.close()
		last := d.do(line)
		var e struct{ Event string }
		err := json.Unmarshal(out.Bytes(), &e)
		if last != (out.Len() == 0) || !last && (err != nil || e.Event == "") {
			t.Errorf("%q: last %v, %q, %v", line, last, out.Bytes(), err)
		}
	})
}

// FuzzSendArgs: what is accepted makes a plan that its own chunks fit.
func FuzzSendArgs(f *testing.F) {
	f.Add([]byte(`{"room":1,"chunks":[[1,2],[3]],"aux_index":5,"gap_s":0.5,"timeout":2,"num_kv_tokens":4}`))
	f.Add([]byte(`{"room":1,"chunks":[null],"timeout":1e308}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		var a sendArgs
		if parse(line, &a) != nil || a.validate() != nil {
			return
		}
		pages := 0
		for _, c := range a.Chunks {
			pages += len(c)
		}
		if p := a.plan(); p.Pages != pages || len(a.Chunks) == 0 || a.gap < 0 || a.patience < 0 {
			t.Errorf("%+v makes %+v", a, p)
		}
	})
}

// FuzzReceiveArgs: what is accepted says where the room goes, and for how long to wait.
func FuzzReceiveArgs(f *testing.F) {
	f.Add([]byte(`{"room":1,"bootstrap_addr":"127.0.0.1:8998","kv_indices":[1,2],"aux_index":5,"state_indices":[[1],null],"decode_prefix_len":8,"timeout":2}`))
	f.Add([]byte(`{"room":1,"bootstrap_addr":"x","kv_indices":null,"prefill_dp_rank":-1}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		var a receiveArgs
		if parse(line, &a) != nil || a.validate() != nil {
			return
		}
		d := a.destination()
		if a.Addr == "" || a.patience < 0 || len(d.Pages) != len(a.KV) || len(d.State) != len(a.State) || d.Prefix != a.Prefix ||
			(d.Aux != kvreceiver.AuxSlot{}) != (a.Aux != nil) {
			t.Errorf("%+v makes %+v", a, d)
		}
	})
}
