package nixlkv

import (
	"errors"
	"fmt"
	"testing"
)

func TestParseRoom(t *testing.T) {
	for s, want := range map[string]Room{"0": 0, "7": 7, "007": 7, "9223372036854775807": MaxRoom} {
		if got, err := ParseRoom(s); err != nil || got != want {
			t.Errorf("%q: %d, %v", s, got, err)
		}
		if got, err := ParseRoom([]byte(s)); err != nil || got != want {
			t.Errorf("%q as bytes: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "-1", "+1", " 1", "1 ", "1_000", "0x1", "9223372036854775808", "99999999999999999999", "None"} {
		if got, err := ParseRoom(s); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %d, %v", s, got, err)
		}
	}
}

func FuzzParseRoom(f *testing.F) {
	f.Add("1099511627779")
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRoom(s)
		if err != nil {
			return
		}
		if again, err := ParseRoom(r.String()); err != nil || again != r || r > MaxRoom {
			t.Errorf("%q is %d, and that %d, %v", s, r, again, err)
		}
	})
}

func TestKVTransferError(t *testing.T) {
	cause := fmt.Errorf("%w: no such page", ErrPageRange)
	for _, tc := range []struct {
		e    KVTransferError
		want string
	}{
		{KVTransferError{Room: 7, Reason: "it failed"}, "KVTransferError(bootstrap_room=7): it failed"},
		{KVTransferError{Room: 7, Cause: cause}, "KVTransferError(bootstrap_room=7): nixlkv: page index out of range: no such page"},
		{KVTransferError{Room: 7, Reason: "r", Peer: "p"}, "KVTransferError(bootstrap_room=7): r (peer p)"},
		{KVTransferError{Room: 7, Reason: "p said r", Peer: "p"}, "KVTransferError(bootstrap_room=7): p said r"},
		{KVTransferError{Room: 7, Reason: "r", Ranks: []RankReport{{Rank: 0, State: RankDone}}}, "KVTransferError(bootstrap_room=7): r"},
		{KVTransferError{Room: 7, Reason: "r", Ranks: []RankReport{{Rank: 0, State: RankDone}, {Rank: 1}, {Rank: 2, State: RankLost}}},
			"KVTransferError(bootstrap_room=7): r [rank 0 done, rank 1 silent, rank 2 lost]"},
	} {
		if got := tc.e.Error(); got != tc.want {
			t.Errorf("got %q, want %q", got, tc.want)
		}
	}
	var te *KVTransferError
	err := fmt.Errorf("outside: %w", &KVTransferError{Room: 9, Cause: cause})
	if !errors.As(err, &te) || te.Room != 9 || !errors.Is(err, ErrPageRange) {
		t.Errorf("errors do not find their way through %v", err)
	}
}

func TestNames(t *testing.T) {
	for s, want := range map[fmt.Stringer]string{
		Bootstrapping: "Bootstrapping", WaitingForInput: "WaitingForInput", Transferring: "Transferring", Success: "Success", Failed: "Failed",
		Status(99): "Status(99)", RankSilent: "silent", RankFailed: "failed", RankState(99): "RankState(99)", Room(5): "5",
	} {
		if s.String() != want {
			t.Errorf("got %q, want %q", s, want)
		}
	}
	var zero Status
	if zero != Bootstrapping || zero.Ended() || !Failed.Ended() || !Success.Ended() {
		t.Error("a status is wrong about itself")
	}
}
