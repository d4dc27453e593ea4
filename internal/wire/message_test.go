package wire

import (
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestSmallMessages(t *testing.T) {
	at := Endpoint{"::1", 7}
	for _, c := range []struct {
		frames string
		decode bool // arrives at a decode
		want   Message
		encode func(*Encoder) ([][]byte, error) // nil: has frames that are not encoded
	}{
		{"ABORT|0", false, &Abort{}, func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{}) }},
		{"ABORT|5|::1|7", false, &Abort{Room: 5, From: at}, func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{Room: 5, From: at}) }},
		{"ABORT|5|::1|7|18446744073709551615", false, &Abort{Room: 5, From: at, Generation: 1<<64 - 1, HasGeneration: true}, func(e *Encoder) ([][]byte, error) {
			return e.Abort(&Abort{Room: 5, From: at, Generation: 1<<64 - 1, HasGeneration: true})
		}},
		{"ABORT|5|::1|7|0", false, &Abort{Room: 5, From: at, HasGeneration: true}, func(e *Encoder) ([][]byte, error) {
			return e.Abort(&Abort{Room: 5, From: at, HasGeneration: true})
		}},
		{"ABORT|5|::1|7|1|later", false, &Abort{Room: 5, From: at, Generation: 1, HasGeneration: true, Extra: 1}, nil},
		{"BOOTSTRAP|5|::1|7", false, &Bootstrap{Room: 5, From: at}, func(e *Encoder) ([][]byte, error) { return e.Bootstrap(&Bootstrap{Room: 5, From: at}) }},
		{"BOOTSTRAP|5|::1|7||", false, &Bootstrap{Room: 5, From: at, Extra: 2}, nil},
		{"ABORT_ACK|5|3", true, &AbortAck{Room: 5, PrefillRank: 3}, func(e *Encoder) ([][]byte, error) { return e.AbortAck(&AbortAck{Room: 5, PrefillRank: 3}) }},
		{"ABORT_ACK|5|3|9", true, &AbortAck{Room: 5, PrefillRank: 3, Generation: 9, HasGeneration: true}, func(e *Encoder) ([][]byte, error) {
			return e.AbortAck(&AbortAck{Room: 5, PrefillRank: 3, Generation: 9, HasGeneration: true})
		}},
		{"KV_STATUS|5|4|3|", true, &KVStatus{Room: 5, Status: PollSuccess, PrefillRank: 3}, func(e *Encoder) ([][]byte, error) {
			return e.KVStatus(&KVStatus{Room: 5, Status: PollSuccess, PrefillRank: 3})
		}},
		{"KV_STATUS|5|0|3|disk on fire", true, &KVStatus{Room: 5, PrefillRank: 3, Reason: "disk on fire"}, func(e *Encoder) ([][]byte, error) {
			return e.KVStatus(&KVStatus{Room: 5, Status: PollFailed, PrefillRank: 3, Reason: "disk on fire"})
		}},
		{"KV_STATUS|5|3|3||x|y", true, &KVStatus{Room: 5, Status: PollTransferring, PrefillRank: 3, Extra: 2}, nil},
	} {
		t.Run(c.frames, func(t *testing.T) {
			parse, other := ParseAtPrefill, ParseAtDecode
			if c.decode {
				parse, other = other, parse
			}
			if got, err := parse(split(c.frames), Limits{}); err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%+v, %v, want %+v", got, err, c.want)
			}
			if got, err := other(split(c.frames), Limits{}); got != nil || !isAll(err, ErrUnknown, nixlkv.ErrMalformed) {
				t.Errorf("at the other side: %+v, %v", got, err)
			}
			if c.encode != nil {
				got, err := c.encode(&Encoder{})
				if err != nil {
					t.Fatal(err)
				}
				sameFrames(t, got, split(c.frames))
			}
		})
	}
}

func TestSmallMessagesRefused(t *testing.T) {
	for _, c := range []struct {
		frames string
		decode bool
		frame  int
		target error
		text   string
		room   nixlkv.Room
	}{
		{"", false, 0, ErrUnknown, `""`, 0},
		{"nixlmsgguard|1", false, 0, ErrUnknown, `"nixlmsgguard"`, 0},
		{"ABORT ", false, 0, ErrUnknown, `"ABORT "`, 0},
		{strings.Repeat("x", 1000), true, 0, ErrUnknown, `"…`, 0},
		{"NixlMsgGuard", false, -1, ErrTruncated, "1 frames, at least 8", 0},
		{"NixlMsgGuard|None", false, -1, ErrTruncated, "2 frames, at least 13", 0},
		{"ABORT", false, -1, ErrTruncated, "1 frames, at least 2", 0},
		{"ABORT|x", false, 1, nixlkv.ErrMalformed, `"x"`, 0},
		{"ABORT|5|::1", false, 3, nixlkv.ErrMalformed, `""`, 5},
		{"ABORT|5|::1|0", false, 3, nixlkv.ErrMalformed, "port 0", 5},
		{"ABORT|5||1", false, 2, nixlkv.ErrMalformed, "no address", 5},
		{"ABORT|5|::1|1|", false, 4, nixlkv.ErrMalformed, `""`, 5},
		{"ABORT|5|::1|1|-1", false, 4, nixlkv.ErrMalformed, `"-1"`, 5},
		{"ABORT|5|::1|1|18446744073709551616", false, 4, nixlkv.ErrMalformed, "above", 5},
		{"BOOTSTRAP|5|::1", false, -1, ErrTruncated, "3 frames, at least 4", 5},
		{"BOOTSTRAP|5|::1|99999", false, 3, nixlkv.ErrMalformed, "port 99999", 5},
		{"ABORT_ACK|5", true, -1, ErrTruncated, "2 frames, at least 3", 5},
		{"ABORT_ACK|5|-3", true, 2, nixlkv.ErrMalformed, `"-3"`, 5},
		{"ABORT_ACK|5|3|", true, 3, nixlkv.ErrMalformed, `""`, 5},
		{"KV_STATUS|5|4|3", true, -1, ErrTruncated, "4 frames, at least 5", 5},
		{"KV_STATUS|5|5|3|", true, 2, nixlkv.ErrMalformed, `"5" is above 4`, 5},
		{"KV_STATUS|5|4|x|", true, 3, nixlkv.ErrMalformed, `"x"`, 5},
		{"STAGING_REQ|5", true, 0, ErrStaging, "STAGING_REQ", 0},
		{"CHUNK_READY", true, 0, ErrStaging, "CHUNK_READY", 0},
		{"STAGING_RSP|5", false, 0, ErrStaging, "STAGING_RSP", 0},
		{"WATERMARK", false, 0, ErrStaging, "WATERMARK", 0},
	} {
		t.Run(c.frames, func(t *testing.T) {
			parse := ParseAtPrefill
			if c.decode {
				parse = ParseAtDecode
			}
			m, err := parse(split(c.frames), Limits{})
			if m != nil {
				t.Fatalf("accepted: %+v", m)
			}
			fe := refused(t, err, c.frame, c.target, c.text)
			if fe.Room != c.room || fe.HasRoom != (c.room != 0) {
				t.Errorf("room %v %v", fe.Room, fe.HasRoom)
			}
		})
	}
}

func TestSmallMessagesNotEncoded(t *testing.T) {
	over := nixlkv.MaxRoom + 1
	at := Endpoint{"h", 1}
	for name, encode := range map[string]func(*Encoder) ([][]byte, error){
		"abort room":               func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{Room: over}) },
		"abort address":            func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{From: Endpoint{"h", 0}}) },
		"abort without IP":         func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{From: Endpoint{"", 1}}) },
		"generation without where": func(e *Encoder) ([][]byte, error) { return e.Abort(&Abort{HasGeneration: true}) },
		"ack room":                 func(e *Encoder) ([][]byte, error) { return e.AbortAck(&AbortAck{Room: over}) },
		"ack rank":                 func(e *Encoder) ([][]byte, error) { return e.AbortAck(&AbortAck{PrefillRank: -1}) },
		"bootstrap room":           func(e *Encoder) ([][]byte, error) { return e.Bootstrap(&Bootstrap{Room: over, From: at}) },
		"bootstrap address":        func(e *Encoder) ([][]byte, error) { return e.Bootstrap(&Bootstrap{}) },
		"status room":              func(e *Encoder) ([][]byte, error) { return e.KVStatus(&KVStatus{Room: over}) },
		"status rank":              func(e *Encoder) ([][]byte, error) { return e.KVStatus(&KVStatus{PrefillRank: 1 << 31}) },
		"status":                   func(e *Encoder) ([][]byte, error) { return e.KVStatus(&KVStatus{Status: 5}) },
	} {
		frames, err := encode(&Encoder{})
		if frames != nil {
			t.Errorf("%s: encoded", name)
		}
		refused(t, err, -1, nixlkv.ErrMalformed, "")
	}
}

func TestKVStatusReason(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"not UTF-8", "bad \xff\xfe end", "bad \uFFFD end"},
		{"long", strings.Repeat("x", 5000), strings.Repeat("x", 4072) + "… (cut, of 5000 bytes)"},
		{"long, cut at a rune", strings.Repeat("x", 4070) + strings.Repeat("失", 10), strings.Repeat("x", 4070) + "… (cut, of 4100 bytes)"},
		{"as long as it may be", strings.Repeat("x", 4093) + "失", strings.Repeat("x", 4093) + "失"},
		{"line feeds are kept", "a\nb", "a\nb"},
		{"others are not", "a\x00b\x1b[2J", "a\uFFFDb\uFFFD[2J"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := ParseAtDecode([][]byte{[]byte("KV_STATUS"), []byte("1"), []byte("0"), []byte("0"), []byte(c.in)}, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			if got := m.(*KVStatus).Reason; got != c.want {
				t.Errorf("parsed %d bytes %.40q, want %d", len(got), got, len(c.want))
			}
			frames, err := new(Encoder).KVStatus(&KVStatus{Reason: c.in})
			if err != nil {
				t.Fatal(err)
			}
			if got := string(frames[4]); got != c.want {
				t.Errorf("encoded %d bytes %.40q, want %d", len(got), got, len(c.want))
			}
		})
	}
	m, err := ParseAtDecode(split("KV_STATUS|1|0|0|失敗"), Limits{Reason: 4})
	if err != nil || m.(*KVStatus).Reason != "失" {
		t.Errorf("%+v, %v", m, err)
	}
	for _, limit := range []int{1<<63 - 1, 1, -1} {
		if _, err := ParseAtDecode(split("KV_STATUS|1|0|0|some reason"), Limits{Reason: limit}); err != nil {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}

func TestKVPoll(t *testing.T) {
	for n, want := range map[KVPoll]nixlkv.Status{
		0: nixlkv.Failed, 1: nixlkv.Bootstrapping, 2: nixlkv.WaitingForInput, 3: nixlkv.Transferring, 4: nixlkv.Success,
	} {
		got, ok := n.Status()
		back, ok2 := PollOf(want)
		if got != want || back != n || !ok || !ok2 || n.String() != want.String() {
			t.Errorf("%d: %v, back %d", n, got, back)
		}
	}
	if _, ok := KVPoll(5).Status(); ok || KVPoll(5).String() != "KVPoll(5)" {
		t.Errorf("5 is %v", KVPoll(5))
	}
	if _, ok := PollOf(nixlkv.Status(99)); ok {
		t.Error("a status that does not exist has a number")
	}
}

func TestRanks(t *testing.T) {
	seen := map[int]PrefillPosition{}
	for tp := range 4 {
		for pp := range 3 {
			for cp := range 2 {
				p := PrefillPosition{TPRank: tp, PPSize: 3, PPRank: pp, CPSize: 2, CPRank: cp}
				if want := tp*3*2 + pp*2 + cp; p.Rank() != want {
					t.Errorf("%+v: %d, want %d", p, p.Rank(), want)
				}
				if other, ok := seen[p.Rank()]; ok {
					t.Errorf("%+v and %+v share a number", p, other)
				}
				seen[p.Rank()] = p
			}
		}
	}
	if got := SourceRank(1, 4, 2); got != 6 {
		t.Errorf("source %d", got)
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		Endpoint{"::1", 80}.String():  "[::1]:80",
		Endpoint{"a.b", 80}.String():  "a.b:80",
		VRAM.String():                 "VRAM",
		KindUnset.String():            "unset",
		Kind(9).String():              "Kind(9)",
		DialectStatus.String():        "status",
		DialectNotifications.String(): "notifications",
		TagKVPart.String():            "kv part",
		TagKind(0).String():           "TagKind(0)",
		TagKind(7).String():           "TagKind(7)",
		(&FrameError{Message: "m", Frame: 2, Field: "f", Err: ErrTruncated}).Error(): "m frame 2 (f): nixlkv: malformed: truncated",
		(&FrameError{Message: "m", Frame: -1, Err: ErrTruncated}).Error():            "m: nixlkv: malformed: truncated",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
