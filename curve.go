package nixlkv

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"fmt"
)

// Curve are keys of CurveZMQ (ZeroMQ RFC 26), which encrypts control messages and lets only
// those in who have a key. They are Z85 text of 40 characters, as zmq_curve_keypair gives them.
//
// A manager has one pair, for what it receives and for what it sends. The simplest deployment
// gives one pair to all of its prefills and decodes. One that wants to tell the two sides apart
// gives a pair to the prefills and another to the decodes, and each side the other's public key
// as ServerKey. Either way a peer proves that it has the secret key that belongs to ServerKey,
// or to one of ClientKeys, before anything that it sends is read.
//
// SGLang's workers speak no CURVE: where it is on, both sides are this library's.
type Curve struct {
	PublicKey, SecretKey string
	// ServerKey is the public key of every peer; PublicKey if empty.
	ServerKey string
	// ClientKeys are further public keys that peers may connect with. This side sends to none
	// that does not have ServerKey.
	ClientKeys []string
}

// String names the public keys alone.
func (c Curve) String() string {
	return fmt.Sprintf("Curve(public %s, server %s, %d client keys)", c.PublicKey, c.ServerKey, len(c.ClientKeys))
}

// GoString is String: %#v does not tell the secret either.
func (c Curve) GoString() string { return c.String() }

// NewCurve draws a pair of keys, for one deployment or one of its sides.
func NewCurve() (Curve, error) {
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return Curve{}, fmt.Errorf("nixlkv: drawing CURVE keys: %w", err)
	}
	return Curve{PublicKey: z85(k.PublicKey().Bytes()), SecretKey: z85(k.Bytes())}, nil
}

// z85 encodes bytes, a multiple of four of them, five characters for every four (ZeroMQ
// RFC 32).
func z85(b []byte) string {
	const digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
	out := make([]byte, 0, len(b)/4*5)
	for ; len(b) >= 4; b = b[4:] {
		n := binary.BigEndian.Uint32(b)
		var group [5]byte
		for i := len(group) - 1; i >= 0; i-- {
			group[i] = digits[n%85]
			n /= 85
		}
		out = append(out, group[:]...)
	}
	return string(out)
}
