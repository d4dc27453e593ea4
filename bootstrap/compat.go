package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// DecodeConfig is what a decode worker compares with a prefill's topology before it asks it
// for anything.
type DecodeConfig struct {
	Geometry

	PageSize               int    // tokens of a KV page; 0: not compared
	KVCacheDtype           string // as given to --kv-cache-dtype, `auto` included; "": not compared
	KVLayout               string // "": not compared
	DSV41SpecLayout        json.RawMessage
	DecodeAllocationPolicy AllocationPolicy
	// StateTypes names the state components (`mamba`, `dsa`, `block_scale`, …).
	StateTypes []string
}

// MismatchError is one thing in which prefill and decode are configured differently. It wraps
// nixlkv.ErrMismatch.
type MismatchError struct {
	What            string // page size, KV cache dtype, …
	Prefill, Decode string // the two values
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("%v: %s: prefill has %s, decode has %s", nixlkv.ErrMismatch, e.What, e.Prefill, e.Decode)
}

// Unwrap gives nixlkv.ErrMismatch.
func (e *MismatchError) Unwrap() error { return nixlkv.ErrMismatch }

// CheckDecode tells whether a decode worker can take KV cache from a prefill, by the rules of
// SGLang's decode (CommonKVManager.try_ensure_parallel_info, CommonKVReceiver.init; 0.5.23,
// whose rules include those of the releases before it). What a side does not tell is not
// compared, except DSV41SpecLayout and DecodeAllocationPolicy, where not telling is a value.
//
// The error joins everything that is wrong: MismatchErrors, and errors that wrap
// nixlkv.ErrTopology for sizes that do not go with the configuration. The geometry as such is
// MapRanks' to judge.
func CheckDecode(t Topology, d DecodeConfig) error {
	var errs []error
	differ := func(what, prefill, decode string) {
		errs = append(errs, &MismatchError{What: what, Prefill: prefill, Decode: decode})
	}
	if t.PageSize != 0 && d.PageSize != 0 && t.PageSize != d.PageSize {
		differ("page size", strconv.Itoa(t.PageSize), strconv.Itoa(d.PageSize))
	}
	if t.KVCacheDtype != "" && d.KVCacheDtype != "" && t.KVCacheDtype != d.KVCacheDtype {
		differ("KV cache dtype", strconv.Quote(t.KVCacheDtype), strconv.Quote(d.KVCacheDtype))
	}
	if t.KVLayout != "" && d.KVLayout != "" && t.KVLayout != d.KVLayout {
		differ("KV layout", strconv.Quote(t.KVLayout), strconv.Quote(d.KVLayout))
	}
	if p, q := t.DecodeAllocationPolicy.orEarly(), d.DecodeAllocationPolicy.orEarly(); p != q {
		differ("decode allocation policy", strconv.Quote(string(p)), strconv.Quote(string(q)))
	} else if p == PrefillCompleteAllocation {
		errs = append(errs, checkPrefillComplete(t, d))
	}
	errs = append(errs, checkSpecLayout(t, d), checkStateTypes(t, d))
	return errors.Join(errs...)
}

// checkPrefillComplete: a room has one endpoint on either side under this policy, and only
// full attention and DSA can wait for their pages.
func checkPrefillComplete(t Topology, d DecodeConfig) error {
	for _, size := range []int{t.AttnTPSize, t.AttnCPSize, t.PPSize, d.TP, d.CP, d.PP} {
		if orOne(size) != 1 {
			return fmt.Errorf("%w: %s needs TP, CP and PP size 1, prefill has %d, %d, %d, decode %d, %d, %d",
				nixlkv.ErrTopology, PrefillCompleteAllocation, orOne(t.AttnTPSize), orOne(t.AttnCPSize), orOne(t.PPSize),
				orOne(d.TP), orOne(d.CP), orOne(d.PP))
		}
	}
	for _, s := range d.StateTypes {
		if s != "dsa" {
			return fmt.Errorf("%w: %s with state %q", nixlkv.ErrTopology, PrefillCompleteAllocation, s)
		}
	}
	return nil
}

// checkSpecLayout: DeepSeek-V4.1 with DSpark pairs regions by position, so the two layouts
// must be the same, and so must the TP sizes; a prefill whose CP ranks make up the decode's
// TP will do for MLA.
func checkSpecLayout(t Topology, d DecodeConfig) error {
	if t.DSV41SpecLayout == nil && d.DSV41SpecLayout == nil {
		return nil
	}
	keys, err := differingKeys(t.DSV41SpecLayout, d.DSV41SpecLayout)
	if err != nil {
		return fmt.Errorf("DSV41SpecLayout: %w", err)
	}
	if len(keys) > 0 {
		return &MismatchError{
			What:    "DeepSeek-V4.1 DSpark layout (" + strings.Join(keys, ", ") + ")",
			Prefill: layoutText(t.DSV41SpecLayout), Decode: layoutText(d.DSV41SpecLayout),
		}
	}
	p, cp, tp := orOne(t.AttnTPSize), orOne(t.AttnCPSize), orOne(d.TP)
	if p == tp || (d.Attention != MHA && cp > 1 && orOne(d.CP) == 1 && p*cp == tp) {
		return nil
	}
	return fmt.Errorf("%w: DeepSeek-V4.1 DSpark needs equal TP sizes, prefill has %d (CP %d), decode %d",
		nixlkv.ErrTopology, p, cp, tp)
}

func layoutText(raw json.RawMessage) string {
	if raw == nil {
		return "none"
	}
	return excerpt(raw)
}

// checkStateTypes: state that no rank can cut into another number of heads.
func checkStateTypes(t Topology, d DecodeConfig) error {
	p, tp := orOne(t.AttnTPSize), orOne(d.TP)
	if p == tp {
		return nil
	}
	i := slices.IndexFunc(d.StateTypes, func(s string) bool {
		switch s {
		case "minimax_index_k":
			return true
		case "block_scale", "block_scale_swa":
			return d.Attention == MHA
		}
		return false
	})
	if i < 0 {
		return nil
	}
	return fmt.Errorf("%w: state %q needs equal TP sizes, prefill has %d, decode %d",
		nixlkv.ErrTopology, d.StateTypes[i], p, tp)
}
