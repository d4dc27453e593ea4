package main

import (
	"crypto/sha256"
	"fmt"
)

// fill writes the pattern that the configuration asks for: memory stays zero without a seed.
// Slot i of KV region r holds SHA-256 of the text "SEED/kv/r/i", repeated and cut to the
// length of a slot. State component c has SEED/state<c>/r/i, and aux AUXSEED/aux/r/i: every
// rank of a prefill holds the same metadata.
func (m *memory) fill(c *config) {
	if c.FillSeed == nil {
		return
	}
	fillAll(m.kv, *c.FillSeed+"/kv")
	fillAll(m.aux, c.AuxSeed+"/aux")
	for i, component := range m.state {
		fillAll(component, fmt.Sprintf("%s/state%d", *c.FillSeed, i))
	}
}

func fillAll(list []slotted, seed string) {
	for r, s := range list {
		for i := range s.slots() {
			fillSlot(s.slot(i), fmt.Sprintf("%s/%d/%d", seed, r, i))
		}
	}
}

// fillSlot repeats the digest of a text.
func fillSlot(slot []byte, text string) {
	sum := sha256.Sum256([]byte(text))
	for n := 0; n < len(slot); {
		n += copy(slot[n:], sum[:])
	}
}
