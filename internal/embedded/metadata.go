package embedded

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Metadata, little-endian, no padding:
//
//	[8]byte  magic
//	uint16   version
//	[16]byte agent id, random
//	uint64   epoch: grows with each change of what is registered
//	[16]byte boot id
//	uint64   network namespace: device
//	uint64   network namespace: inode
//	uint16   length of the name, the name
//	uint16   length of the Unix socket's address, the address
//	uint8    number of TCP addresses, then of each, in the order in which to try them
//	    uint16 length of host:port, host:port
//	uint32   number of regions, then of each, ids ascending
//	    uint64 id, never used again by this agent
//	    uint64 address
//	    uint64 length
//	    uint64 device
//	    uint32 kind of memory (engine.Mem)
//	    uint32 flags: 1 a descriptor of the memory can be had
const (
	metadataMagic   = "\x89nkvEMB\n"
	metadataVersion = 2

	flagShared = 1

	regionSize = 4*8 + 2*4
	maxAddress = 107 // sun_path, less one
)

var (
	// errForeignMetadata: not made by this engine, or by another version of it.
	errForeignMetadata = errors.New("not metadata of this engine")
	errBadMetadata     = errors.New("malformed metadata")
)

// agentID tells an agent from an earlier one of the same name.
type agentID [16]byte

type metadata struct {
	id      agentID
	epoch   uint64
	host    hostID
	name    string
	address string
	tcp     []string
	regions []regionInfo
}

// regionInfo is what a peer may know of a region.
type regionInfo struct {
	id     uint64
	addr   uint64
	n      uint64
	dev    uint64
	mem    engine.Mem
	shared bool // backed by a memfd that can be handed over
}

func (m *metadata) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, 80+len(m.name)+len(m.address)+regionSize*len(m.regions))
	b = append(b, metadataMagic...)
	b = le.AppendUint16(b, metadataVersion)
	b = append(b, m.id[:]...)
	b = le.AppendUint64(b, m.epoch)
	b = append(b, m.host.boot[:]...)
	b = le.AppendUint64(b, m.host.netDev)
	b = le.AppendUint64(b, m.host.netInode)
	b = le.AppendUint16(b, uint16(len(m.name)))
	b = append(b, m.name...)
	b = le.AppendUint16(b, uint16(len(m.address)))
	b = append(b, m.address...)
	b = append(b, uint8(len(m.tcp)))
	for _, s := range m.tcp {
		b = le.AppendUint16(b, uint16(len(s)))
		b = append(b, s...)
	}
	b = le.AppendUint32(b, uint32(len(m.regions)))
	for _, r := range m.regions {
		var flags uint32
		if r.shared {
			flags = flagShared
		}
		b = le.AppendUint64(b, r.id)
		b = le.AppendUint64(b, r.addr)
		b = le.AppendUint64(b, r.n)
		b = le.AppendUint64(b, r.dev)
		b = le.AppendUint32(b, uint32(r.mem))
		b = le.AppendUint32(b, flags)
	}
	return b
}

// parseMetadata accepts exactly what encode makes.
func parseMetadata(b []byte) (*metadata, error) {
	d := decoder{rest: b}
	if string(d.bytes(len(metadataMagic))) != metadataMagic {
		return nil, fmt.Errorf("%w: no magic in %d bytes", errForeignMetadata, len(b))
	}
	if v := d.u16(); v != metadataVersion && !d.short {
		return nil, fmt.Errorf("%w: version %d, want %d", errForeignMetadata, v, metadataVersion)
	}
	m := &metadata{}
	copy(m.id[:], d.bytes(len(m.id)))
	m.epoch = d.u64()
	copy(m.host.boot[:], d.bytes(len(m.host.boot)))
	m.host.netDev = d.u64()
	m.host.netInode = d.u64()
	m.name = string(d.bytes(int(d.u16())))
	m.address = string(d.bytes(int(d.u16())))
	if err := m.parseTCP(&d); err != nil {
		return nil, err
	}
	count := d.u32()
	switch {
	case d.short:
		return nil, fmt.Errorf("%w: %d bytes are too few", errBadMetadata, len(b))
	case m.name == "" || len(m.name) > MaxName:
		return nil, fmt.Errorf("%w: agent name of %d bytes", errBadMetadata, len(m.name))
	case len(m.address) < 2 || len(m.address) > maxAddress || m.address[0] != '@':
		return nil, fmt.Errorf("%w: socket address %.120q", errBadMetadata, m.address)
	case m.epoch == 0:
		return nil, fmt.Errorf("%w: epoch 0", errBadMetadata)
	case count > MaxRegions || uint64(count)*regionSize != uint64(len(d.rest)):
		return nil, fmt.Errorf("%w: %d regions in %d bytes", errBadMetadata, count, len(d.rest))
	}
	m.regions = make([]regionInfo, count)
	for i := range m.regions {
		r := regionInfo{id: d.u64(), addr: d.u64(), n: d.u64(), dev: d.u64(), mem: engine.Mem(d.u32())}
		flags := d.u32()
		r.shared = flags&flagShared != 0
		switch {
		case flags&^flagShared != 0, r.mem != engine.DRAM, r.dev != 0:
			return nil, fmt.Errorf("%w: region %d: kind %d, device %d, flags %#x", errBadMetadata, i, r.mem, r.dev, flags)
		case !validRange(r.addr, r.n):
			return nil, fmt.Errorf("%w: region %d: %d bytes at %#x", errBadMetadata, i, r.n, r.addr)
		case r.id == 0 || i > 0 && r.id <= m.regions[i-1].id:
			return nil, fmt.Errorf("%w: region %d: id %d is out of order", errBadMetadata, i, r.id)
		}
		m.regions[i] = r
	}
	return m, nil
}

func (m *metadata) parseTCP(d *decoder) error {
	n := d.u8()
	if n > maxTCPAddresses {
		return fmt.Errorf("%w: %d TCP addresses", errBadMetadata, n)
	}
	for range n {
		s := string(d.bytes(int(d.u16())))
		if d.short {
			return nil // found out by the caller
		}
		if err := checkTCPAddress(s); err != nil {
			return fmt.Errorf("%w: %w", errBadMetadata, err)
		}
		m.tcp = append(m.tcp, s)
	}
	return nil
}

// validRange says whether n bytes from addr can be a region: not empty, not at the null
// address, and with an end that an int64 can hold.
func validRange(addr, n uint64) bool {
	return addr != 0 && n != 0 && n <= math.MaxInt64 && addr <= math.MaxInt64-n
}

// decoder reads fields one behind the other. Once bytes are missing, short is set and
// everything reads as zero.
type decoder struct {
	rest  []byte
	short bool
}

func (d *decoder) bytes(n int) []byte {
	if n > len(d.rest) {
		d.short, d.rest = true, nil
		return nil
	}
	b := d.rest[:n:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) u8() uint8 {
	if b := d.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if b := d.bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if b := d.bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}
