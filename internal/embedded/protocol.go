package embedded

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// A frame is a header of 16 bytes and a body. Little-endian:
//
//	uint32 length of the body
//	uint8  type
//	uint8  flags
//	uint16 zero
//	uint64 number: what it counts depends on the type
//
// The initiator of a connection sends hello first and waits for welcome; then, of each
// transfer that needs the connection, writes and one commit, in order and not interleaved
// with those of another transfer. Reads are asked for one at a time. Frames about regions
// may come between any two others.
type frameType uint8

const (
	// From the initiator.
	frameHello    frameType = 1 + iota // who calls, and whom
	frameMap                           // number: region; asks for its memory
	frameUnmapped                      // number: grant; the memory of a grant was let go
	frameWrite                         // number: transfer; parts and their bytes
	frameRead                          // number: transfer; parts
	frameCommit                        // number: transfer; ends it, body: notification
)

const (
	// From the target.
	frameWelcome  frameType = 32 + iota // the answer to hello
	frameRegion                         // number: region; the answer to map, with a descriptor
	frameUnmap                          // number: grant; asks to let its memory go
	frameData                           // number: transfer; bytes of a read, in order
	frameReadDone                       // number: transfer; ends the data
	frameDone                           // number: transfer; the answer to commit
	frameRefused                        // instead of welcome
)

const (
	flagNotification = 1 // in commit: the body is a notification, even if it is empty

	headerSize = 16
	partSize   = 3 * 8
	maxParts   = 2048    // in a write or read
	maxPayload = 1 << 20 // bytes in a write or data frame
	maxRead    = 8 << 20 // bytes asked for by one read frame

	helloMagic      = "nkvEMB\r\n"
	protocolVersion = 2

	// notificationCost is what a notification of no bytes counts against a window.
	notificationCost = 64
	// notificationWindow is how many bytes of notifications, each with its cost, may be
	// on their way to a target that has not acknowledged them.
	notificationWindow = 2 * (MaxNotification + notificationCost)
)

// errProtocol: a peer sent what the protocol does not allow. Its connection ends.
var errProtocol = errors.New("protocol violation")

type header struct {
	typ    frameType
	flags  uint8
	number uint64
	length uint32
}

// maxBody bounds the body of a frame, or says that there is no such type.
func maxBody(t frameType) (uint32, bool) {
	switch t {
	case frameHello:
		return 64 + MaxName, true
	case frameMap, frameUnmapped, frameUnmap:
		return 0, true
	case frameWrite:
		return 4 + maxParts*partSize + maxPayload, true
	case frameRead:
		return 4 + maxParts*partSize, true
	case frameCommit:
		return MaxNotification, true
	case frameWelcome:
		return 16, true
	case frameRefused:
		return refusalSize, true
	case frameRegion:
		return regionAnswerSize, true
	case frameData:
		return maxPayload, true
	case frameReadDone, frameDone:
		return 4 + partSize, true
	}
	return 0, false
}

// appendHeader starts a frame whose body's length is known.
func appendHeader(b []byte, t frameType, flags uint8, number uint64, length int) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, uint32(length))
	b = append(b, byte(t), flags, 0, 0)
	return le.AppendUint64(b, number)
}

// parseHeader refuses a header whose body would be longer than its type allows.
func parseHeader(b []byte) (header, error) {
	if len(b) != headerSize {
		return header{}, fmt.Errorf("%w: header of %d bytes", errProtocol, len(b))
	}
	h := header{
		length: binary.LittleEndian.Uint32(b),
		typ:    frameType(b[4]),
		flags:  b[5],
		number: binary.LittleEndian.Uint64(b[8:]),
	}
	limit, known := maxBody(h.typ)
	switch {
	case !known || b[6] != 0 || b[7] != 0:
		return header{}, fmt.Errorf("%w: no frame starts with % x", errProtocol, b)
	case h.number != 0 && (h.typ == frameHello || h.typ == frameWelcome || h.typ == frameRefused):
		return header{}, fmt.Errorf("%w: number %d in a frame of type %d", errProtocol, h.number, h.typ)
	case h.flags != 0 && (h.typ != frameCommit || h.flags != flagNotification):
		return header{}, fmt.Errorf("%w: flags %#x in a frame of type %d", errProtocol, h.flags, h.typ)
	case h.length > limit:
		return header{}, fmt.Errorf("%w: body of %d bytes in a frame of type %d", errProtocol, h.length, h.typ)
	}
	return h, nil
}

// hello names the initiator, and the target that it means. Its first fields stay the same
// in all versions of the protocol, as do the header and the refusal.
type hello struct {
	from agentID
	to   agentID
	name string
}

// errVersion: the two ends speak different versions of the protocol.
var errVersion = fmt.Errorf("other version of the embedded engine's protocol: %w", engine.ErrUnsupported)

func (h hello) append(b []byte) []byte {
	b = appendHeader(b, frameHello, 0, 0, len(helloMagic)+2+2*16+len(h.name))
	b = append(b, helloMagic...)
	b = binary.LittleEndian.AppendUint16(b, protocolVersion)
	b = append(b, h.from[:]...)
	b = append(b, h.to[:]...)
	return append(b, h.name...)
}

func parseHello(body []byte) (hello, error) {
	var h hello
	d := decoder{rest: body}
	magic, version := d.bytes(len(helloMagic)), d.u16()
	copy(h.from[:], d.bytes(16))
	copy(h.to[:], d.bytes(16))
	switch {
	case d.short || string(magic) != helloMagic:
		return h, fmt.Errorf("%w: not a hello", errProtocol)
	case version != protocolVersion:
		return h, fmt.Errorf("%w: %d, not %d", errVersion, version, protocolVersion)
	}
	if len(d.rest) == 0 || len(d.rest) > MaxName {
		return h, fmt.Errorf("%w: agent name of %d bytes", errProtocol, len(d.rest))
	}
	h.name = string(d.rest)
	return h, nil
}

func appendWelcome(b []byte, from agentID) []byte {
	b = appendHeader(b, frameWelcome, 0, 0, len(from))
	return append(b, from[:]...)
}

func parseWelcome(body []byte) (from agentID, err error) {
	if len(body) != len(from) {
		return from, fmt.Errorf("%w: welcome of %d bytes", errProtocol, len(body))
	}
	copy(from[:], body)
	return from, nil
}

// refusal is why a target will not speak with who said hello.
type refusal struct {
	version uint16 // of the target
	reason  refusalReason
}

type refusalReason uint16

const (
	refusedVersion refusalReason = 1 + iota // the hello was of another version
	refusedAgent                            // another agent was meant, which is not here
	refusalCount
)

const refusalSize = 4

// errNotHere: another agent listens at the address.
var errNotHere = errors.New("another agent has taken its address")

func (r refusal) append(b []byte) []byte {
	b = appendHeader(b, frameRefused, 0, 0, refusalSize)
	b = binary.LittleEndian.AppendUint16(b, r.version)
	return binary.LittleEndian.AppendUint16(b, uint16(r.reason))
}

// parseRefusal gives an error in any case.
func parseRefusal(body []byte) (refusal, error) {
	d := decoder{rest: body}
	r := refusal{version: d.u16(), reason: refusalReason(d.u16())}
	switch {
	case d.short || len(d.rest) != 0 || r.reason == 0 || r.reason >= refusalCount:
		return r, fmt.Errorf("%w: refusal % x", errProtocol, body)
	case r.reason == refusedVersion:
		return r, fmt.Errorf("%w: the peer has %d, this agent %d", errVersion, r.version, protocolVersion)
	}
	return r, errNotHere
}

// part is a piece of a region of the target.
type part struct{ region, off, n uint64 }

func appendPart(b []byte, p part) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, p.region)
	b = le.AppendUint64(b, p.off)
	return le.AppendUint64(b, p.n)
}

// parts are the table of a write or read frame, not copied.
type parts []byte

func (t parts) len() int { return len(t) / partSize }

func (t parts) at(i int) part {
	le, b := binary.LittleEndian, t[i*partSize:]
	return part{le.Uint64(b), le.Uint64(b[8:]), le.Uint64(b[16:])}
}

// parseParts splits the body of a write or read into the table and what follows, and adds
// the parts up. The sum is at most limit.
func parseParts(body []byte, limit uint64) (table parts, sum uint64, rest []byte, err error) {
	d := decoder{rest: body}
	count := d.u32()
	if d.short || count == 0 || count > maxParts {
		return nil, 0, nil, fmt.Errorf("%w: %d parts", errProtocol, count)
	}
	table = d.bytes(int(count) * partSize)
	if d.short {
		return nil, 0, nil, fmt.Errorf("%w: %d parts in %d bytes", errProtocol, count, len(body))
	}
	for i := range table.len() {
		n := table.at(i).n
		if n > limit || sum > limit-n {
			return nil, 0, nil, fmt.Errorf("%w: parts of more than %d bytes", errProtocol, limit)
		}
		sum += n
	}
	return table, sum, d.rest, nil
}

// tableSize gives the bytes of the parts of a write of this length.
func tableSize(count, length uint32) (int, error) {
	if count == 0 || count > maxParts || 4+count*partSize > length {
		return 0, fmt.Errorf("%w: %d parts in %d bytes", errProtocol, count, length)
	}
	return int(count) * partSize, nil
}

// parseWrite checks that the bytes which follow the body are as many as the parts say.
func parseWrite(body []byte, follow uint64) (parts, error) {
	table, sum, rest, err := parseParts(body, maxPayload)
	if err == nil && (sum != follow || len(rest) != 0) {
		err = fmt.Errorf("%w: parts of %d bytes, %d bytes given", errProtocol, sum, follow)
	}
	if err != nil {
		return nil, err
	}
	return table, nil
}

func parseRead(body []byte) (parts, error) {
	table, _, rest, err := parseParts(body, maxRead)
	if err == nil && len(rest) != 0 {
		err = fmt.Errorf("%w: %d bytes behind a read", errProtocol, len(rest))
	}
	if err != nil {
		return nil, err
	}
	return table, nil
}

// code is how a target answers.
type code uint32

const (
	codeOK            code = iota
	codeNotRegistered      // the part is not inside of a registered region
	codeFault              // the target's own memory could not be accessed
	codeCount
)

// result is the answer to a transfer; part names what was wrong.
type result struct {
	code code
	part part
}

func appendResult(b []byte, t frameType, number uint64, r result) []byte {
	b = appendHeader(b, t, 0, number, 4+partSize)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.code))
	return appendPart(b, r.part)
}

func parseResult(body []byte) (result, error) {
	if len(body) != 4+partSize {
		return result{}, fmt.Errorf("%w: result of %d bytes", errProtocol, len(body))
	}
	r := result{code: code(binary.LittleEndian.Uint32(body)), part: parts(body[4:]).at(0)}
	if r.code >= codeCount {
		return result{}, fmt.Errorf("%w: result code %d", errProtocol, r.code)
	}
	return r, nil
}

// regionAnswer answers a map. With codeOK a descriptor of the file comes along; dev and
// inode tell it from that of another answer, should the kernel have dropped one because
// the receiver may have no more open.
type regionAnswer struct {
	code  code
	grant uint64 // names the answer when the memory is let go; not zero with codeOK
	off   int64  // of the region in the file
	dev   uint64
	inode uint64
}

const regionAnswerSize = 4 + 4*8

func (r regionAnswer) append(b []byte, region uint64) []byte {
	le := binary.LittleEndian
	b = appendHeader(b, frameRegion, 0, region, regionAnswerSize)
	b = le.AppendUint32(b, uint32(r.code))
	b = le.AppendUint64(b, r.grant)
	b = le.AppendUint64(b, uint64(r.off))
	b = le.AppendUint64(b, r.dev)
	return le.AppendUint64(b, r.inode)
}

func parseRegion(body []byte) (regionAnswer, error) {
	d := decoder{rest: body}
	r := regionAnswer{code: code(d.u32()), grant: d.u64(), off: int64(d.u64()), dev: d.u64(), inode: d.u64()}
	if d.short || len(d.rest) != 0 || r.code >= codeCount || r.off < 0 || (r.code == codeOK) != (r.grant != 0) {
		return regionAnswer{}, fmt.Errorf("%w: region answer % x", errProtocol, body)
	}
	return r, nil
}
