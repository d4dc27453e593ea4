package embedded

import (
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// FuzzTarget feeds any bytes to an agent, behind a greeting, over each transport. Whatever
// they are, memory that is not registered stays as it is, and the agent goes on.
func FuzzTarget(f *testing.F) {
	const third = 4096
	mem := foreign(f, 3*third)
	var agents []*Agent
	for _, kind := range transports {
		b := kind.agent(f, "b", engine.AgentConfig{})
		if err := b.Register(engine.DRAM, []engine.Region{{Addr: mem.addr() + third, Len: third, FD: -1}}); err != nil {
			f.Fatal(err)
		}
		agents = append(agents, b)
	}
	for _, s := range sampleFrames() {
		f.Add(s)
	}
	f.Add(frame(frameWrite, 0, 1, partsBody(1, 8, part{1, third - 8, 8})))
	f.Add(frame(frameWrite, 0, 1, partsBody(1, 8, part{1, third - 7, 8})))
	f.Add(frame(frameWrite, 0, 1, partsBody(3, third, part{1, 0, 100}, part{1, third, 0}, part{1, 96, third - 100})))
	f.Add(frame(frameRead, 0, 1, partsBody(2, 0, part{1, 0, third}, part{1, 0, third})))
	f.Fuzz(func(t *testing.T, input []byte) {
		for _, b := range agents {
			raw := greet(t, b)
			raw.send(input)
			if err := raw.closeWrite(); err != nil {
				raw.conn.Close() // the agent was quicker
			} else {
				raw.wantClosed()
			}
			for i, v := range mem.data {
				if v != 0 && (i < third || i >= 2*third) {
					t.Fatalf("byte %d was written", i)
				}
			}
			var buf engine.Notifications
			if err := b.Notifications(&buf); err != nil || buf.Validate() != nil {
				t.Fatal(err)
			}
		}
	})
}

// FuzzInitiator has any bytes answer an agent's requests, behind a welcome, over each
// transport. Whatever they are, the requests end, nothing but the memory that was to be
// read into is written, and the agent goes on.
func FuzzInitiator(f *testing.F) {
	const third = 4096
	mem := foreign(f, 3*third)
	type side struct {
		a *Agent
		f *fakeTarget
	}
	var sides []side
	for _, kind := range transports {
		s := side{kind.agent(f, "a", engine.AgentConfig{}), kind.fakeTarget(f, third)}
		register(f, s.a, mem)
		s.f.regions[0].shared = false
		sides = append(sides, s)
	}
	for _, s := range sampleFrames() {
		f.Add(s)
	}
	data := frame(frameData, 0, 1, make([]byte, third/2))
	f.Add(append(data, data...))
	f.Add(appendResult(append(data, data...), frameReadDone, 1, result{}))
	f.Add(appendResult(nil, frameReadDone, 1, result{codeFault, part{5, 0, third}}))
	f.Add(appendResult(nil, frameDone, 2, result{}))
	f.Fuzz(func(t *testing.T, input []byte) {
		for _, s := range sides {
			s.f.id[1]++ // another agent each time
			remote := loadBytes(t, s.a, s.f.encode())
			var flying []engine.Request
			for _, op := range []engine.Op{engine.Read, engine.Write} {
				flying = append(flying, transfer(t, s.a, engine.Spec{
					Op: op, Remote: remote, Post: true, HasNotif: true,
					LocalList:  newList(t, s.a, engine.Desc{Addr: mem.addr() + third, Len: third}),
					RemoteList: newList(t, s.a, engine.Desc{Addr: 1 << 20, Len: third}),
				}))
			}
			raw := s.f.accept(t)
			raw.send(append(appendWelcome(nil, s.f.id), input...))
			if raw.closeWrite() != nil {
				raw.conn.Close()
			} else {
				raw.wantClosed()
			}
			for _, r := range flying {
				settled(t, s.a, r)
			}
			for i, v := range mem.data {
				if v != 0 && (i < third || i >= 2*third) {
					t.Fatalf("byte %d was written", i)
				}
			}
		}
	})
}
