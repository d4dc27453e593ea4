package wire

import (
	"cmp"

	"github.com/nixlkv/nixlkv/internal/reasons"
)

// Limits bounds what a message from outside may make a parser allocate. They are checked
// before anything is allocated. A field that is not positive takes its default.
type Limits struct {
	Frames          int // frames of a message, ignored ones included; default 64
	FrameSize       int // bytes of any one frame; default 16 MiB
	AgentName       int // bytes of an agent name; default 256
	AgentMetadata   int // bytes of NIXL's agent metadata; default 16 MiB
	Regions         int // KV regions of a registration; default 4096
	AuxBuffers      int // aux buffers of a registration; default 256
	StateComponents int // state components of a registration or a room; default 64
	StateTensors    int // tensors of one state component; default 4096
	Indices         int // KV indices of a room, and state indices of one component; default 4 Mi
	Reason          int // bytes of a failure reason; longer ones are cut, not refused; default 4096
}

// DefaultLimits gives the defaults. They fit a page of one token in a context of four
// million, and any model that SGLang serves.
func DefaultLimits() Limits {
	return Limits{
		Frames:          64,
		FrameSize:       16 << 20,
		AgentName:       256,
		AgentMetadata:   16 << 20,
		Regions:         4096,
		AuxBuffers:      256,
		StateComponents: 64,
		StateTensors:    4096,
		Indices:         4 << 20,
		Reason:          reasons.Sent,
	}
}

// withDefaults fills the fields that are not set.
func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	or := func(v, def int) int { return cmp.Or(max(v, 0), def) }
	return Limits{
		Frames:          or(l.Frames, d.Frames),
		FrameSize:       or(l.FrameSize, d.FrameSize),
		AgentName:       or(l.AgentName, d.AgentName),
		AgentMetadata:   or(l.AgentMetadata, d.AgentMetadata),
		Regions:         or(l.Regions, d.Regions),
		AuxBuffers:      or(l.AuxBuffers, d.AuxBuffers),
		StateComponents: or(l.StateComponents, d.StateComponents),
		StateTensors:    or(l.StateTensors, d.StateTensors),
		Indices:         or(l.Indices, d.Indices),
		Reason:          or(l.Reason, d.Reason),
	}
}
