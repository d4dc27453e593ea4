package cgo

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// What NIXL does with metadata that is cut short is worse than refusing it: the peer's
// connection is made, the rest fails, and the peer cannot be loaded any more. So the framing
// is walked first (nixlSerDes in src/utils/serdes, nixlAgentData::getLocalMD and
// nixlSecDescList in releases up to 1.5): entries of a tag, a 64-bit length, so many bytes
// and a bar. Tags that this does not know end the walk without a verdict: a later release
// may write others.
//
// What entries hold is checked where NIXL or UCX would use it without looking: a kind of memory
// indexes an array of NIXL's, and UCX reads a remote key as far as the key itself says. Other
// bytes that are wrong pass, above all in a worker's address ("c"), which UCX trusts.

const serdesHeader = "nixlSerDes|"

type serdes struct{ rest []byte }

// entry reads an entry with this tag. known is false if another one stands there.
func (s *serdes) entry(tag string) (value []byte, known bool, err error) {
	b, ok := bytes.CutPrefix(s.rest, []byte(tag))
	if !ok {
		if len(s.rest) < len(tag) && bytes.HasPrefix([]byte(tag), s.rest) {
			return nil, true, errCutShort(tag)
		}
		return nil, false, nil
	}
	if len(b) < 8 {
		return nil, true, errCutShort(tag)
	}
	n := binary.LittleEndian.Uint64(b)
	b = b[8:]
	if n >= uint64(len(b)) {
		return nil, true, errCutShort(tag)
	}
	if b[n] != '|' {
		return nil, true, fmt.Errorf("%w: metadata: entry %q does not end where it says", engine.ErrInvalidParam, tag)
	}
	s.rest = b[n+1:]
	return b[:n], true, nil
}

func errCutShort(tag string) error {
	return fmt.Errorf("%w: metadata: cut short in entry %q", engine.ErrInvalidParam, tag)
}

// entries reads one entry of each tag in turn.
func (s *serdes) entries(tags ...string) (last []byte, known bool, err error) {
	for _, tag := range tags {
		if last, known, err = s.entry(tag); err != nil || !known {
			return last, known, err
		}
	}
	return last, true, nil
}

// checkMetadata checks the framing of an agent's metadata and gives the agent's name.
func checkMetadata(md []byte) (name string, err error) {
	b, ok := bytes.CutPrefix(md, []byte(serdesHeader))
	if !ok {
		return "", fmt.Errorf("%w: not metadata of a NIXL agent", engine.ErrInvalidParam)
	}
	s := serdes{b}
	agent, known, err := s.entry("Agent")
	if err != nil || !known || len(agent) == 0 || bytes.IndexByte(agent, 0) >= 0 {
		return "", fmt.Errorf("%w: metadata without an agent's name", engine.ErrInvalidParam)
	}
	return string(agent), s.walk()
}

// walk goes through what follows the agent's name.
func (s *serdes) walk() error {
	conns, known, err := s.entry("Conns")
	if err != nil || !known {
		return err
	}
	for range count(conns, s.rest) {
		if _, known, err = s.entries("t", "c"); err != nil || !known {
			return err
		}
	}
	if _, known, err = s.entry(""); err != nil || !known {
		return err
	}
	sections, known, err := s.entry("nixlSecElms")
	if err != nil || !known {
		return err
	}
	for range count(sections, s.rest) {
		if known, err = s.section(); err != nil || !known {
			return err
		}
	}
	return nil
}

// section reads the registrations of one backend and kind of memory.
func (s *serdes) section() (known bool, err error) {
	backend, known, err := s.entry("bknd")
	if err != nil || !known {
		return known, err
	}
	kind, known, err := s.entry("nixlDList")
	if err != nil || !known {
		return known, err
	}
	mem, known, err := s.entry("t")
	if err != nil || !known {
		return known, err
	}
	if len(mem) != 4 || binary.LittleEndian.Uint32(mem) > lastMem {
		return true, fmt.Errorf("%w: metadata: kind of memory %x", engine.ErrInvalidParam, mem)
	}
	n, known, err := s.entry("n")
	if err != nil || !known {
		return known, err
	}
	descs := count(n, s.rest)
	if string(kind) == "nixlBDList" {
		descs = min(descs, 1) // all in one entry
	}
	for range descs {
		desc, known, err := s.entry("")
		if err != nil || !known {
			return known, err
		}
		if string(kind) == "nixlSDList" {
			if err := checkDesc(string(backend), desc); err != nil {
				return true, err
			}
		}
	}
	return true, nil
}

const (
	lastMem  = 4  // FILE_SEG, the last kind of memory in nixl_types.h
	descSize = 24 // address, length, device
)

// checkDesc checks a registration: where it is, and what its backend says of it.
func checkDesc(backend string, desc []byte) error {
	if len(desc) < descSize {
		return fmt.Errorf("%w: metadata: registration of %d bytes", engine.ErrInvalidParam, len(desc))
	}
	if addr, size := binary.LittleEndian.Uint64(desc), binary.LittleEndian.Uint64(desc[8:]); addr+size < addr {
		return fmt.Errorf("%w: metadata: registration of %d bytes at %#x", engine.ErrInvalidParam, size, addr)
	}
	if backend == "UCX" || backend == "UCX_MO" {
		return checkKey(desc[descSize:])
	}
	return nil
}

// checkKey checks that a remote key of UCX ends where its bytes do: a map of memory domains, a
// kind of memory, and for each domain a length and so many bytes (ucp_ep_rkey_unpack, which is
// not told how long the key is). What may follow is read only by a UCX that wrote it.
func checkKey(key []byte) error {
	const header = 9
	if len(key) < header {
		return fmt.Errorf("%w: metadata: remote key of %d bytes", engine.ErrInvalidParam, len(key))
	}
	rest := key[header:]
	for range bits.OnesCount64(binary.LittleEndian.Uint64(key)) {
		if len(rest) == 0 || len(rest) <= int(rest[0]) {
			return fmt.Errorf("%w: metadata: remote key of %d bytes is cut short", engine.ErrInvalidParam, len(key))
		}
		rest = rest[1+int(rest[0]):]
	}
	return nil
}

// count reads a number of entries, which cannot be more than there are bytes left to hold
// them: a larger one runs into the end there.
func count(b, rest []byte) int {
	var n [8]byte
	copy(n[:], b)
	return int(min(binary.LittleEndian.Uint64(n[:]), uint64(len(rest))+1))
}
