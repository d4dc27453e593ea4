package engine

import (
	"encoding/binary"
	"errors"
	"iter"
)

// Notifications is a buffer that an engine drains notifications into. It keeps its memory
// between uses. The records lie one behind the other:
//
//	uint32 length of the sender's name, uint32 length of the message (little-endian),
//	the name, the message
//
// One drain therefore is one native call, whatever the number of notifications.
type Notifications struct {
	Records []byte
	Count   int
}

// Reset empties the buffer and keeps its memory.
func (n *Notifications) Reset() { n.Records, n.Count = n.Records[:0], 0 }

// Append adds one record.
func (n *Notifications) Append(from string, msg []byte) {
	n.Records = binary.LittleEndian.AppendUint32(n.Records, uint32(len(from)))
	n.Records = binary.LittleEndian.AppendUint32(n.Records, uint32(len(msg)))
	n.Records = append(n.Records, from...)
	n.Records = append(n.Records, msg...)
	n.Count++
}

// All yields sender and message of every record. Both alias the buffer.
func (n *Notifications) All() iter.Seq2[[]byte, []byte] {
	return func(yield func([]byte, []byte) bool) {
		rest := n.Records
		for range n.Count {
			from, msg, tail, ok := next(rest)
			if !ok || !yield(from, msg) {
				return
			}
			rest = tail
		}
	}
}

// ErrTruncated means that Records is not what Count promises: an engine's fault.
var ErrTruncated = errors.New("nixl: truncated notification record")

// Validate says whether Records holds exactly Count records.
func (n *Notifications) Validate() error {
	rest := n.Records
	for range n.Count {
		_, _, tail, ok := next(rest)
		if !ok {
			return ErrTruncated
		}
		rest = tail
	}
	if len(rest) != 0 {
		return ErrTruncated
	}
	return nil
}

func next(b []byte) (from, msg, rest []byte, ok bool) {
	if len(b) < 8 {
		return nil, nil, nil, false
	}
	nf, nm := uint64(binary.LittleEndian.Uint32(b)), uint64(binary.LittleEndian.Uint32(b[4:]))
	b = b[8:]
	if nf+nm > uint64(len(b)) {
		return nil, nil, nil, false
	}
	return b[:nf:nf], b[nf : nf+nm : nf+nm], b[nf+nm:], true
}
