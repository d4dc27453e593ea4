// Package trust says which addresses a manager has to do with. It is arithmetic on addresses;
// who asks it, and when, is the managers' and package control's.
package trust

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// List is the networks that peers may be in. The zero List is everywhere.
type List struct{ prefixes []netip.Prefix }

// NewList makes a list of networks; none of them makes the zero List. IPv4 networks written as
// IPv6 (::ffff:10.0.0.0/104) mean the IPv4 ones. The error wraps nixlkv.ErrMalformed.
func NewList(prefixes ...netip.Prefix) (List, error) {
	var l List
	for _, p := range prefixes {
		if a := p.Addr(); p.IsValid() && a.Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
		}
		if !p.IsValid() {
			return List{}, fmt.Errorf("%w: network %v", nixlkv.ErrMalformed, p)
		}
		l.prefixes = append(l.prefixes, p.Masked())
	}
	return l, nil
}

// Only is NewList for an option that somebody gave: that no network is named is an error, rather
// than everywhere, as without the option.
func Only(prefixes ...netip.Prefix) (List, error) {
	if len(prefixes) == 0 {
		return List{}, errors.New("no network is allowed")
	}
	return NewList(prefixes...)
}

// Everywhere says whether the list leaves nobody out.
func (l List) Everywhere() bool { return len(l.prefixes) == 0 }

// Allows says whether an address is in one of the networks. The zero Addr, which is nobody's,
// is in none.
func (l List) Allows(a netip.Addr) bool {
	a = Canonical(a)
	return l.Everywhere() || slices.ContainsFunc(l.prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Canonical gives the form in which addresses are compared: IPv4 as IPv4, and without the
// zone, which is one host's own name of a network.
func Canonical(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// Policy is what a manager asks of the address that a message names for its answer.
type Policy struct {
	Allowed List
	// MatchSource: it must be the one that the message's connection comes from.
	MatchSource bool
}

// Check says why an answer must not go to an address that a message from source named. The
// error wraps nixlkv.ErrNotAllowed. A host name is nowhere that could be checked.
func (p Policy) Check(named string, source netip.Addr) error {
	if p.Allowed.Everywhere() && !p.MatchSource {
		return nil
	}
	a, err := netip.ParseAddr(named)
	if err != nil {
		return fmt.Errorf("%w: %q is not an IP address", nixlkv.ErrNotAllowed, named)
	}
	return p.CheckAddr(a, source)
}

// CheckAddr is Check for an address.
func (p Policy) CheckAddr(a, source netip.Addr) error {
	switch {
	case !p.Allowed.Allows(a):
		return fmt.Errorf("%w: %v is not in an allowed network", nixlkv.ErrNotAllowed, a)
	case p.MatchSource && Canonical(a) != Canonical(source):
		return fmt.Errorf("%w: a message from %v names %v", nixlkv.ErrNotAllowed, source, a)
	}
	return nil
}
