// Package engine is the contract between package nixl and what moves the bytes.
//
// Two engines implement it: internal/cgo calls NVIDIA's NIXL library, internal/embedded
// is written in Go. Its types are raw: handles are words, addresses are 64-bit numbers.
// An engine checks what only it can know (is this address registered, is that peer
// there); order and lifetime of handles are guarded once, in package nixl, so an engine
// may assume that
//
//   - a handle passed to it is alive, and is not released while a call uses it;
//   - no two calls use the same Request or List at the same time;
//   - a Request is released only when it is not in progress;
//   - Agent.Destroy comes last: after every other call has returned and every Request,
//     Prepared and List has been released.
//
// Everything else may be called from many goroutines at once.
package engine

import "time"

// Mem is a kind of memory, with the numbers of nixl_capi_mem_type_t.
type Mem uint32

// The kinds of memory that NIXL knows. Of the last three, which are storage, an address is
// an offset, and the device says what it is in: the number of the block device, that of the
// object, the descriptor of the file.
const (
	DRAM Mem = iota
	VRAM
	Block
	Object
	File
)

// Op is the direction of a transfer, with the numbers of nixl_capi_xfer_op_t.
type Op uint32

// Read pulls from the remote side into the local one, Write pushes the other way.
const (
	Read Op = iota
	Write
)

// Sync says how an agent guards itself against concurrent calls
// (nixl_capi_thread_sync_t).
type Sync uint32

// The modes of NIXL: none at all, one lock, or a readers-writer lock.
const (
	SyncNone Sync = iota
	SyncStrict
	SyncRW
)

// Handles are words whose meaning belongs to the engine that made them. Zero is none.
type (
	// Backend is a transport that an agent created.
	Backend uintptr
	// Remote is a peer whose metadata an agent has loaded.
	Remote uintptr
	// List is a list of descriptors that can be filled, cleared and filled again.
	List uintptr
	// Prepared is a list bound to its side, from which transfers pick by index.
	Prepared uintptr
	// Request is one transfer.
	Request uintptr
)

// Desc is one contiguous piece of memory. Its layout is part of the contract: three
// 64-bit words, no padding, so that a slice of them crosses into C as it is.
type Desc struct {
	Addr uint64 // first byte
	Len  uint64 // bytes
	Dev  uint64 // CUDA ordinal for VRAM, 0 for DRAM; for the others see Mem
}

// Run stands for Count descriptors of Len bytes whose addresses are Stride bytes apart.
// Its layout is part of the contract: five 64-bit words, no padding.
type Run struct {
	Addr   uint64 // first byte of the first descriptor
	Len    uint64 // bytes of each
	Dev    uint64 // as in Desc
	Stride uint64 // bytes from one descriptor's start to the next
	Count  uint64 // descriptors
}

// Region is memory to register. The memory is the caller's and stays mapped until it is
// deregistered.
type Region struct {
	Addr uint64 // first byte
	Len  uint64 // bytes
	Dev  uint64 // as in Desc
	FD   int    // memfd that backs the memory, or -1
	Off  int64  // offset of Addr in FD
	Meta []byte // what the backend wants to know of it (the key of an Object); usually nil
}

// AgentConfig configures an agent. The zero value is not useful; package nixl fills it.
type AgentConfig struct {
	ProgressThread bool          // the engine moves transfers on by itself
	ProgressDelay  time.Duration // pause of that thread; 0 leaves it to the engine
	Sync           Sync
	Telemetry      bool // keep times of each transfer, for Agent.Telemetry
	// HostVRAM treats VRAM as host memory: registrations, lists and transfers of VRAM are
	// made as DRAM with device 0. For machines that have no GPU. Storage is not touched by it.
	HostVRAM bool
}

// Spec describes one transfer: either by descriptors (LocalList, RemoteList, Remote) or
// by index into prepared lists (the Prep and Index fields, which then must be of equal
// length). The engine copies what it needs before Create returns.
type Spec struct {
	Op Op

	LocalList, RemoteList List
	Remote                Remote

	LocalPrep, RemotePrep   Prepared
	LocalIndex, RemoteIndex []int32

	Notif    []byte // delivered to the peer after the bytes; may be empty
	HasNotif bool
	NoMerge  bool // keep neighbouring descriptors apart
	Post     bool // post at once
}

// Telemetry is what an engine measured of a finished transfer.
type Telemetry struct {
	Start       time.Time     // zero where the engine's clock has no date
	Post        time.Duration // spent in posting
	Total       time.Duration // from posting to completion
	Bytes       uint64
	Descriptors uint64 // after merging
}

// Cost is an engine's estimate of a transfer's duration.
type Cost struct {
	Duration time.Duration
	Margin   time.Duration
	Method   uint32 // nixl_capi_cost_t
}

// Info says which engine this is.
type Info struct {
	Name    string // "native" or "embedded"
	Version string // of the library, empty if it cannot be told
	Path    string // of the library
	Calls   string // how the library is called: "cgo", "purego", or empty
	// LoadAdds: loading a peer again adds to what was loaded before, and forgets nothing.
	LoadAdds bool
	// Overrode names the environment variables that the engine had to change, with the
	// values they had, for the log.
	Overrode []string
}

// Engine makes agents.
type Engine interface {
	Info() Info
	// NewAgent makes an agent. The name must be unique among all agents that meet.
	NewAgent(name string, cfg AgentConfig) (Agent, error)
}

// Agent is one participant. Its errors wrap a Status where the library gave one.
type Agent interface {
	// Plugins names the backends that could be created.
	Plugins() ([]string, error)
	// PluginParams gives a plugin's default parameters and the kinds of memory it serves.
	PluginParams(plugin string) (map[string]string, []Mem, error)
	CreateBackend(plugin string, params map[string]string) (Backend, error)
	BackendParams(Backend) (map[string]string, []Mem, error)

	Register(Mem, []Region) error
	// Deregister takes regions as they were registered. When it returns without error,
	// nothing in this host writes to them on behalf of a peer through this engine any more,
	// as far as the engine can know.
	Deregister(Mem, []Region) error

	// LocalMetadata is what a peer needs to reach this agent's registered memory.
	LocalMetadata() ([]byte, error)
	// MetadataName tells whose metadata it is, as far as can be told without loading it.
	MetadataName(metadata []byte) (string, error)
	// LoadRemote reads a peer's metadata. Loading the same peer again updates it and gives
	// a second handle; each must be forgotten. A name that comes with an error says that
	// nothing is loaded under it any more, whatever was before.
	LoadRemote(metadata []byte) (r Remote, name string, err error)
	// CheckRemote says whether metadata of the peer is still loaded.
	CheckRemote(Remote) error
	// Connect wires the peer up before the first transfer does.
	Connect(Remote) error
	// InvalidateRemote drops the peer's metadata and connections. The handle stays valid
	// until FreeRemote.
	InvalidateRemote(Remote) error
	FreeRemote(Remote)
	// Self is the agent as the far side of its own transfers: how storage is reached, which
	// it has registered itself. The handle is good for Create and PrepareRemote, lives as long
	// as the agent and is not freed.
	Self() (Remote, error)

	NewList(Mem) (List, error)
	Append(List, []Desc) error
	AppendRuns(List, []Run) error
	Clear(List) error
	FreeList(List)

	// PrepareLocal and PrepareRemote bind a list; the list may be cleared or freed after.
	PrepareLocal(List) (Prepared, error)
	PrepareRemote(Remote, List) (Prepared, error)
	FreePrepared(Prepared) error

	// Create makes a request and, with Spec.Post, posts it. The Status is InProgress or
	// Success when err is nil (Success for a request that is not posted). A request that
	// could be made but not posted comes back together with the error and must be released.
	Create(*Spec) (Request, Status, error)
	// Post posts a request again, or for the first time; with hasNotif it replaces the
	// notification.
	Post(r Request, notif []byte, hasNotif bool) (Status, error)
	// Poll fills out[i] with the status of reqs[i].
	Poll(reqs []Request, out []Status)
	// Reason explains a request whose status is an error; nil if the engine knows no more
	// than the status. It wraps ErrPeerLost when the connection to the peer is broken, as do
	// the errors of Create and Post.
	Reason(Request) error
	Release(Request) error
	Telemetry(Request) (Telemetry, error)
	EstimateCost(Request) (Cost, error)

	// Notify sends a notification without a transfer.
	Notify(Remote, []byte) error
	// Notifications drains what has arrived into dst, replacing what dst held.
	Notifications(dst *Notifications) error

	// Destroy ends the agent. An error means that it is still there.
	Destroy() error
}
