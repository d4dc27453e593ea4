package control

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestConfigComplete(t *testing.T) {
	handler := func([][]byte) {}
	cfg, err := Config{Handler: handler}.complete()
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Host != "127.0.0.1" || cfg.Linger != time.Second || cfg.SendTimeout != 30*time.Second || cfg.Limits.Frames != 128 {
		t.Errorf("defaults %+v", cfg)
	}
	if cfg, err = (Config{Handler: handler, Linger: -1}).complete(); err != nil || cfg.Linger != 0 {
		t.Errorf("linger %v, %v", cfg.Linger, err)
	}
	if cfg, err = (Config{Handler: handler, Limits: Limits{MessageBytes: 100}}).complete(); err != nil || cfg.Limits.FrameBytes != 100 {
		t.Errorf("frames of %d bytes in messages of 100, %v", cfg.Limits.FrameBytes, err)
	}
	for name, bad := range map[string]Config{
		"no handler":        {},
		"port":              {Handler: handler, Port: 65536},
		"negative timeout":  {Handler: handler, SendTimeout: -1},
		"reconnect order":   {Handler: handler, ReconnectMin: 2, ReconnectMax: 1},
		"negative limit":    {Handler: handler, Limits: Limits{Frames: -1}},
		"frame > message":   {Handler: handler, Limits: Limits{FrameBytes: 2, MessageBytes: 1}},
		"message > pending": {Handler: handler, Limits: Limits{MessageBytes: 2, EndpointPendingBytes: 1}},
		"too many":          {Handler: handler, Limits: Limits{Endpoints: maxEndpoints + 1}},
		"keys":              {Handler: handler, Curve: &Curve{}},
	} {
		if _, err := bad.complete(); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever is set alone is either refused or kept, and the rest fits it.
func TestLimitsProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		some := func(name string) int { return rapid.OneOf(rapid.Just(0), rapid.IntRange(-5, 1<<40)).Draw(t, name) }
		in := Limits{
			Frames: some("frames"), FrameBytes: some("frame bytes"), MessageBytes: some("message bytes"),
			Pending: some("pending"), PendingBytes: some("pending bytes"),
			EndpointPending: some("endpoint pending"), EndpointPendingBytes: some("endpoint pending bytes"),
		}
		out, err := in.complete()
		if err != nil {
			if !errors.Is(err, ErrConfig) {
				t.Fatal(err)
			}
			return
		}
		if out.FrameBytes > out.MessageBytes || out.MessageBytes > out.EndpointPendingBytes ||
			out.EndpointPendingBytes > out.PendingBytes || out.EndpointPending > out.Pending || out.Frames < 1 || out.FrameBytes < 1 {
			t.Fatalf("%+v gave %+v", in, out)
		}
		if again, err := out.complete(); err != nil || again != out {
			t.Fatalf("%+v is not stable: %+v, %v", out, again, err)
		}
		if (in.FrameBytes != 0 && in.FrameBytes != out.FrameBytes) || (in.Pending != 0 && in.Pending != out.Pending) {
			t.Fatalf("%+v became %+v", in, out)
		}
	})
}

func TestEventKindString(t *testing.T) {
	for k, want := range map[EventKind]string{Connected: "Connected", Released: "Released", 0: "EventKind(0)", 9: "EventKind(9)"} {
		if k.String() != want {
			t.Errorf("%d: %q", k, k)
		}
	}
}
