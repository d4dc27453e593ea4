package main

// A child reads commands, a line each, and answers each with a report, a line of JSON.
const (
	cmdStart  = "start"  // begin the rooms; a decode's streams have one each, by a list of numbers the first to have
	cmdCount  = "count"  // how many so far
	cmdSample = "sample" // collect garbage, then tell everything
	cmdStop   = "stop"   // end with the rooms that are under way; what is still busy then is left over
	cmdClose  = "close"  // give everything back; what is left then is left over
	// For decodes: the streams go on with their other rooms.
	cmdGo = "go"
	// For the prefill, with the number of a decode process.
	cmdKilling = "killing" // its rooms may fail from now on
	cmdKilled  = "killed"  // it is dead: wait for the end of its rooms, tell how many there were and where its streams are
	cmdRevived = "revived" // another is in its place: its streams go on
	// For the prefill.
	cmdCalm  = "calm"  // wait until it is connected to no decode but those it knows
	cmdAlone = "alone" // all decodes have ended: what is still held for one is left over
	// For guests.
	cmdVisit = "visit" // come and go, and get a room each time
	cmdOther = "other" // the same, from the second prefill
	cmdPass  = "pass"  // come and go, without a room
)

// maxLine bounds a command and an answer; the longest have a number for each stream.
const maxLine = 1 << 20

// report is a child's answer.
type report struct {
	Error string `json:",omitempty"` // the command failed; nothing else is told then

	Addr   string `json:",omitempty"` // of a prefill's bootstrap server
	Other  string `json:",omitempty"` // of its second one's, with guests
	Engine string `json:",omitempty"` // that a prefill runs on

	Arrived, Aborted, Failed uint64
	Lost, Unmet              uint64 `json:",omitempty"` // that failed, or never began, because their decode was killed
	Next                     []int  `json:",omitempty"` // which room each stream of a decode process has next
	Begun                    int    `json:",omitempty"` // streams that have had their first room
	FirstFailure             string `json:",omitempty"`
	Latency                  times  `json:",omitempty"` // since the last sample

	Goroutines int
	Held       map[string]int `json:",omitempty"` // what is there as long as the peers are
	Busy       map[string]int `json:",omitempty"` // what rooms in flight need
	Left       []string       `json:",omitempty"` // that should be gone
}

func (r *report) rooms() uint64 { return r.Arrived + r.Aborted + r.Failed + r.Lost + r.Unmet }

// role is what a child is.
type role string

const (
	rolePrefill role = "prefill"
	roleDecode  role = "decode"
	roleGuest   role = "guest"
)

// childConfig is what a child is started with.
type childConfig struct {
	Role    role
	Process int    // of the decodes
	Addr    string // of the prefill's bootstrap server, for all others
	Other   string // of the second prefill's, for guests
	Plan    plan
}
