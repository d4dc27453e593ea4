package wire

import (
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// Where room metadata keeps what.
const (
	metaRoom = iota + 1
	metaIP
	metaPort
	metaAgent
	metaKVIndices
	metaAuxIndex
	metaDestinations
	metaStateIndices
	metaPrefix
	metaDummy
	metaFrames

	metaRequired = metaDestinations + 1
)

var metadataFields = [metaFrames]string{
	0:                fieldTag,
	metaRoom:         fieldRoom,
	metaIP:           fieldIP,
	metaPort:         fieldPort,
	metaAgent:        fieldAgent,
	metaKVIndices:    "KV indices",
	metaAuxIndex:     "aux index",
	metaDestinations: "destinations needed",
	metaStateIndices: "state indices",
	metaPrefix:       "decode prefix length",
	metaDummy:        "dummy flag",
}

const metadataName = "room metadata"

// Metadata tells a prefill rank where the pages of a room go
// (NixlKVManager.build_receiver_metadata_message in 0.5.23, NixlKVReceiver.send_metadata
// before; read by TransferInfo.from_zmq).
type Metadata struct {
	Room  nixlkv.Room
	From  Endpoint // where the decode's PULL socket listens
	Agent string   // NIXL agent name; its registration came before
	// KVIndices are destination pages after the decode's prefix, in the order in which the
	// prefill sends. None of a room that is not a dummy: there is no KV to send, while aux
	// and state still go.
	KVIndices []int32
	AuxIndex  int // destination aux slot
	// Destinations is how many decode ranks have to send metadata before the room is
	// bootstrapped; at least 1.
	Destinations int
	StateIndices [][]int32 // destination slots, one list a component
	Prefix       int       // tokens that the decode has already
	// Dummy: nothing is to be written, the room merely must not wait for this decode. KV and
	// state indices of a dummy are not sent.
	Dummy bool

	Extra int // frames that were ignored; not encoded
}

func parseMetadata(r *reader) *Metadata {
	r.open(metadataName, metadataFields[:], metaRequired)
	m := &Metadata{
		Room:         r.room(metaRoom),
		From:         r.endpoint(metaIP),
		Agent:        r.agent(metaAgent),
		AuxIndex:     parseAuxIndex(r),
		Destinations: r.count(metaDestinations),
		Prefix:       int(r.numberOr(metaPrefix, maxInt, 0)),
		KVIndices:    words[int32](r, metaKVIndices, r.limits.Indices),
		StateIndices: lists[int32](r, metaStateIndices, r.limits.Indices),
		Extra:        r.extra(),
	}
	switch string(r.frame(metaDummy)) {
	case "0":
	case "1":
		m.Dummy = true
	case "":
		// Peers older than the flag; a full prefix hit has no pages either.
		m.Dummy = len(m.KVIndices) == 0 && m.Prefix == 0
	default:
		r.fail(metaDummy, malformed("%s, expected 0 or 1", quoted(r.frame(metaDummy))))
	}
	if r.err != nil {
		return nil
	}
	if m.Dummy && len(m.KVIndices) > 0 {
		r.fail(metaKVIndices, malformed("%d of a dummy, expected none", len(m.KVIndices)))
	}
	if m.Dummy {
		m.StateIndices = nil
	}
	r.fail(m.check())
	return m
}

// parseAuxIndex tells a missing index apart: a SGLang decode without one sends "None".
func parseAuxIndex(r *reader) int {
	b := r.frame(metaAuxIndex)
	n, fault := parseDecimal(b, maxInt)
	if fault != decimalOK {
		r.fail(metaAuxIndex, fmt.Errorf("%w: %w", nixlkv.ErrAuxIndex, fault.err(b, maxInt)))
		return 0
	}
	return int(n)
}

// check gives the first frame that is wrong.
func (m *Metadata) check() (int, error) {
	if err := checkRoom(m.Room); err != nil {
		return metaRoom, err
	}
	if err := checkHost(m.From.IP); err != nil {
		return metaIP, err
	}
	if err := checkPort(m.From.Port); err != nil {
		return metaPort, err
	}
	if err := checkAgent(m.Agent, math.MaxInt); err != nil {
		return metaAgent, err
	}
	if m.AuxIndex < 0 || m.AuxIndex > maxInt {
		return metaAuxIndex, fmt.Errorf("%w: %d", nixlkv.ErrAuxIndex, m.AuxIndex)
	}
	if m.Destinations < 1 || m.Destinations > maxInt {
		return metaDestinations, malformed("%d, expected at least 1", m.Destinations)
	}
	if m.Prefix < 0 || m.Prefix > maxInt {
		return metaPrefix, malformed("%d tokens", m.Prefix)
	}
	if i := firstNegative(m.KVIndices); i >= 0 {
		return metaKVIndices, fmt.Errorf("%w: %d at position %d", nixlkv.ErrPageRange, m.KVIndices[i], i)
	}
	for c, l := range m.StateIndices {
		if i := firstNegative(l); i >= 0 {
			return metaStateIndices, fmt.Errorf("%w: component %d: index %d at position %d", nixlkv.ErrState, c, l[i], i)
		}
	}
	return 0, nil
}

// firstNegative gives the position of the first negative index; negative if there is none.
// Long lists are all right nearly always, so whether is asked before where.
func firstNegative(indices []int32) int {
	var signs int32
	for _, i := range indices {
		signs |= i
	}
	if signs >= 0 {
		return -1
	}
	return slices.IndexFunc(indices, func(i int32) bool { return i < 0 })
}

// Metadata encodes where a room's pages go, in 11 frames. It refuses indices that are
// negative and whatever else no parser would take.
func (e *Encoder) Metadata(m *Metadata) ([][]byte, error) {
	if frame, err := m.check(); err != nil {
		return nil, &FrameError{
			Message: metadataName, Frame: frame, Field: metadataFields[frame], Err: err,
			Room: m.Room, HasRoom: true, From: m.From, Agent: m.Agent,
		}
	}
	e.begin(tagGuard)
	e.number(uint64(m.Room))
	e.endpoint(m.From)
	e.text(m.Agent)
	if m.Dummy {
		e.text("")
	} else {
		e.end(pack(e.buf, m.KVIndices))
	}
	e.number(uint64(m.AuxIndex))
	e.number(uint64(m.Destinations))
	if m.Dummy {
		e.text("")
	} else {
		e.end(packLists(e.buf, m.StateIndices))
	}
	e.number(uint64(m.Prefix))
	if m.Dummy {
		e.text("1")
	} else {
		e.text("0")
	}
	return e.frames(), nil
}
