package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/nixlkv/nixlkv"
)

// readyEvent comes first: the rank takes commands.
type readyEvent struct {
	Event         string `json:"event"`
	Role          string `json:"role"`
	Agent         string `json:"agent"`     // NIXL agent name
	RankPort      int    `json:"rank_port"` // of the control socket
	LocalIP       string `json:"local_ip"`
	BootstrapPort int    `json:"bootstrap_port,omitempty"` // of the server, if this rank serves it
	Engine        string `json:"engine"`
}

// bootstrappedEvent: every decode rank of a room has told where its pages go.
type bootstrappedEvent struct {
	Event           string      `json:"event"`
	Room            nixlkv.Room `json:"room"`
	DecodePrefixLen int         `json:"decode_prefix_len"` // tokens
}

// doneEvent: the room has ended, or the driver's patience has.
type doneEvent struct {
	Event  string      `json:"event"`
	Room   nixlkv.Room `json:"room"`
	Status string      `json:"status"`

	Error             string `json:"error,omitempty"`
	Message           string `json:"message,omitempty"`
	IsFromAnotherRank *bool  `json:"is_from_another_rank,omitempty"`

	// Of a decode, what lies in the room's slots.
	KVSHA256    string   `json:"kv_sha256,omitempty"`
	AuxSHA256   string   `json:"aux_sha256,omitempty"`
	StateSHA256 []string `json:"state_sha256,omitempty"` // one a component
}

// releasedEvent: nothing is written to the pages of a failed room any more, or, if that is not
// confirmed, nobody knows.
type releasedEvent struct {
	Event     string      `json:"event"`
	Room      nixlkv.Room `json:"room"`
	Confirmed bool        `json:"confirmed"`
}

type abortedEvent struct {
	Event string      `json:"event"`
	Room  nixlkv.Room `json:"room"`
}

// expectEvent has the digests of slots of this rank.
type expectEvent struct {
	Event       string   `json:"event"`
	KVSHA256    string   `json:"kv_sha256"`
	AuxSHA256   *string  `json:"aux_sha256"` // null if no slot was named
	StateSHA256 []string `json:"state_sha256"`
}

// strayEvent counts bytes that are not zero outside of the named slots.
type strayEvent struct {
	Event string `json:"event"`
	Bytes int    `json:"bytes"`
}

// roomsEvent tells of the rooms that are not cleared and of the peers that are known.
type roomsEvent struct {
	Event         string                 `json:"event"`
	RequestStatus map[nixlkv.Room]string `json:"request_status"`
	Failures      map[nixlkv.Room]string `json:"failures"`
	Peers         []string               `json:"peers"` // agent names
	Held          int                    `json:"held"`  // rooms that the library keeps, announced ones included
}

// benchEvent has the figures of a bench.
type benchEvent struct {
	Event    string   `json:"event"`
	Role     string   `json:"role"`
	OK       int      `json:"ok"`
	Failed   int      `json:"failed"`
	WallS    float64  `json:"wall_s"`
	RoomsPS  float64  `json:"rooms_per_s"`
	GBPS     float64  `json:"gb_per_s"`
	P50S     *float64 `json:"p50_s"` // null if no room succeeded
	P99S     *float64 `json:"p99_s"`
	CPUS     float64  `json:"cpu_s"`
	FirstErr string   `json:"first_error,omitempty"`
}

// exceptionEvent is about what the driver did not expect.
type exceptionEvent struct {
	Event   string       `json:"event"`
	Room    *nixlkv.Room `json:"room,omitempty"`
	Error   string       `json:"error"`
	Message string       `json:"message"`
}

type byeEvent struct {
	Event string `json:"event"`
}

// events writes events, a line each, from any goroutine.
type events struct {
	mu  sync.Mutex
	enc *json.Encoder
}

func newEvents(w io.Writer) *events {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return &events{enc: enc}
}

// emit writes an event. Nobody is left to be told when it cannot: the reader is gone, and
// with it the end of standard input is near.
func (e *events) emit(event any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = e.enc.Encode(event)
}

// exception says that something was not expected, about a room or, with nil, in general.
func (e *events) exception(room *nixlkv.Room, err error) {
	e.emit(exceptionEvent{Event: "exception", Room: room, Error: errorName(err), Message: err.Error()})
}

// done reports a room. err is what it failed with, nil if it did not.
func (e *events) done(room nixlkv.Room, status nixlkv.Status, err error) {
	e.emit(newDone(room, status, err))
}

func newDone(room nixlkv.Room, status nixlkv.Status, err error) doneEvent {
	d := doneEvent{Event: "done", Room: room, Status: status.String()}
	if err != nil {
		d.Error, d.Message = errorName(err), err.Error()
		var failed *nixlkv.KVTransferError
		if errors.As(err, &failed) {
			d.IsFromAnotherRank = &failed.FromAnotherRank
		}
	}
	return d
}

// errorName gives the name of an error's type, as SGLang's peers give the exception's.
func errorName(err error) string {
	var failed *nixlkv.KVTransferError
	if errors.As(err, &failed) {
		return "KVTransferError"
	}
	name := fmt.Sprintf("%T", err)
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		name = name[i+1:]
	}
	return name
}
