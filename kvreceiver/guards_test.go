package kvreceiver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
)

// fleet is a prefill and a decode of this library, as a server would run them.
type fleet struct {
	t      *testing.T
	engine *nixl.Engine
	p      *examplePrefill
	m      *kvreceiver.Manager
	mem    *memory
}

func newFleet(t *testing.T, prefill []kvsender.Option, decode []kvreceiver.Option) *fleet {
	t.Helper()
	return newGuardedFleet(t, guard{}, prefill, decode)
}

// guard is what the bootstrap server asks of its clients.
type guard struct {
	server []bootstrap.ServerOption
	client []bootstrap.ClientOption
}

func newGuardedFleet(t *testing.T, g guard, prefill []kvsender.Option, decode []kvreceiver.Option) *fleet {
	t.Helper()
	f := &fleet{t: t, engine: must(nixl.Open(nixl.Embedded))}
	t.Cleanup(func() { check(f.engine.Close()) })
	f.p = &examplePrefill{boot: must(bootstrap.Listen("127.0.0.1:0", g.server...)), mem: newMemory()}
	f.p.addr = f.p.boot.Endpoint().String()
	f.p.m = must(kvsender.NewManager(t.Context(), f.p.mem.layout, append(prefill,
		kvsender.WithEngine(f.engine), kvsender.WithMemory(f.p.mem.buf), kvsender.WithBootstrap(f.p.addr, g.client...))...))
	t.Cleanup(func() { check(errors.Join(f.p.m.Close(), f.p.boot.Close(), f.p.mem.buf.Free())) })
	f.m, f.mem = f.decode(decode...)
	return f
}

// decode starts a decode that is closed with the test.
func (f *fleet) decode(opts ...kvreceiver.Option) (*kvreceiver.Manager, *memory) {
	f.t.Helper()
	mem := newMemory()
	m := must(kvreceiver.NewManager(f.t.Context(), mem.layout, append(opts,
		kvreceiver.WithEngine(f.engine), kvreceiver.WithMemory(mem.buf), kvreceiver.WithMetadata(mem.slots))...))
	f.t.Cleanup(func() { check(errors.Join(m.Close(), mem.buf.Free())) })
	return m, mem
}

// move has a room go from the prefill to the decode.
func (f *fleet) move(id nixlkv.Room) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	r := must(f.m.Open(id, f.p.addr))
	defer r.Close()
	f.p.done = make(chan struct{})
	text := fmt.Sprintf("room %d", id)
	go f.p.send(ctx, id, []int32{0, 1}, text)
	check(r.Connect(ctx))
	check(r.Publish(kvreceiver.Destination{Pages: []int32{5, 2}, Aux: kvreceiver.Aux(3)}))
	check(r.Wait(ctx))
	<-f.p.done
	if got := string(f.mem.page(5)[:len(text)]); got != text {
		f.t.Errorf("got %q, want %q", got, text)
	}
}

// refused has a decode try to get a room, which it must not.
func (f *fleet) refused(m *kvreceiver.Manager, id nixlkv.Room, want error) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	r := must(m.Open(id, f.p.addr))
	defer r.Close()
	if err := r.Connect(ctx); !errors.Is(err, want) {
		f.t.Errorf("an intruder connected: %v", err)
	}
}

func (f *fleet) endpoints() (prefill, decode control.Endpoint) {
	return must(control.NewEndpoint("127.0.0.1", f.p.m.ControlPort())), must(control.NewEndpoint("127.0.0.1", f.m.ControlPort()))
}

// intrude sends what would fail a room to both sides, with keys or without.
func (f *fleet) intrude(keys *nixlkv.Curve) {
	f.t.Helper()
	c := must(control.New(control.Config{Handler: func([][]byte) {}, Curve: keys, Linger: -1}))
	prefill, decode := f.endpoints()
	for to, frames := range map[control.Endpoint][]string{prefill: {"ABORT", "1"}, decode: {"KV_STATUS", "1", "0", "0", "intruder"}} {
		m := control.Message{To: to, Deadline: time.Now().Add(500 * time.Millisecond)}
		for _, frame := range frames {
			m.Frames = append(m.Frames, []byte(frame))
		}
		if _, err := c.Send(f.t.Context(), m); !errors.Is(err, nixlkv.ErrSendBlocked) {
			f.t.Errorf("an intruder got through to %v: %v", to, err)
		}
	}
	check(c.Close(f.t.Context()))
}

// With CURVE both sides of this library move rooms, and nobody without the right keys gets
// anywhere, or disturbs those who do.
func TestCurve(t *testing.T) {
	one := must(nixlkv.NewCurve())
	prefill, decode := must(nixlkv.NewCurve()), must(nixlkv.NewCurve())
	prefill.ServerKey, decode.ServerKey = decode.PublicKey, prefill.PublicKey
	for name, keys := range map[string]struct{ prefill, decode nixlkv.Curve }{
		"one pair for all": {one, one},
		"a pair a side":    {prefill, decode},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, []kvsender.Option{kvsender.WithCurve(keys.prefill)}, []kvreceiver.Option{kvreceiver.WithCurve(keys.decode)})
			f.move(1)

			ctx := t.Context()
			open := must(f.m.Open(2, f.p.addr))
			defer open.Close()
			check(open.Connect(ctx))
			check(open.Publish(kvreceiver.Destination{Pages: []int32{7, 8}, Aux: kvreceiver.Aux(4)}))
			before := f.p.m.Stats().Control.MessagesIn

			other := must(nixlkv.NewCurve())
			other.ServerKey = keys.prefill.PublicKey // knows whom it talks to, but is nobody
			soon := kvreceiver.WithSendTimeout(500 * time.Millisecond)
			without, _ := f.decode(soon)
			another, _ := f.decode(soon, kvreceiver.WithCurve(other))
			f.refused(without, 3, nixlkv.ErrSendBlocked)
			f.refused(another, 4, nixlkv.ErrSendBlocked)
			f.intrude(nil)
			f.intrude(&other)

			if s := f.p.m.Stats(); s.Control.PeersRefused == 0 || s.Aborts != 0 || len(s.Peers) != 1 {
				t.Errorf("%d refused, %d aborts, %d peers", s.Control.PeersRefused, s.Aborts, len(s.Peers))
			}
			if s := f.m.Stats(); s.Refused+s.Unknown+s.Failed != 0 {
				t.Errorf("%+v", s)
			}
			if after := f.p.m.Stats().Control.MessagesIn; after > before+1 { // the metadata of room 2
				t.Errorf("%d messages came, of intruders", after-before)
			}
			// The room that was open all the while, and further ones.
			f.p.done = make(chan struct{})
			go f.p.send(ctx, 2, []int32{3, 4}, "undisturbed")
			check(open.Wait(ctx))
			<-f.p.done
			f.move(5)
		})
	}
}

// Keys that cannot be are an error at once, of either side.
func TestCurveKeys(t *testing.T) {
	engine := must(nixl.Open(nixl.Embedded))
	defer func() { check(engine.Close()) }()
	mem := newMemory()
	defer func() { check(mem.buf.Free()) }()
	keys, other := must(nixlkv.NewCurve()), must(nixlkv.NewCurve())
	keys.SecretKey = other.SecretKey
	for name, k := range map[string]nixlkv.Curve{"none": {}, "of two pairs": keys} {
		if _, err := kvsender.NewManager(t.Context(), mem.layout, kvsender.WithEngine(engine), kvsender.WithCurve(k)); !errors.Is(err, control.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := kvreceiver.NewManager(t.Context(), mem.layout, kvreceiver.WithEngine(engine), kvreceiver.WithCurve(k)); !errors.Is(err, control.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Both sides check each other's networks and sources, with and without CURVE.
func TestNetworksAndSources(t *testing.T) {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	keys := must(nixlkv.NewCurve())
	for _, curve := range []bool{false, true} {
		t.Run(fmt.Sprintf("curve=%t", curve), func(t *testing.T) {
			prefill := []kvsender.Option{kvsender.WithAllowedPeers(loopback), kvsender.WithSourceMatching()}
			decode := []kvreceiver.Option{kvreceiver.WithAllowedPeers(loopback), kvreceiver.WithSourceMatching()}
			if curve {
				prefill, decode = append(prefill, kvsender.WithCurve(keys)), append(decode, kvreceiver.WithCurve(keys))
			}
			f := newFleet(t, prefill, decode)
			f.move(1)
			f.move(2)
			if s := f.p.m.Stats(); s.Untrusted != 0 || s.Control.PeersRefused != 0 {
				t.Errorf("%+v", s)
			}
			if s := f.m.Stats(); s.Untrusted != 0 || s.Control.PeersRefused != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// All of it at once: TLS, token and networks at the bootstrap server, CURVE, networks and
// sources at the control sockets.
func TestAllGuards(t *testing.T) {
	ca := httptest.NewUnstartedServer(nil)
	ca.StartTLS()
	defer ca.Close()
	roots := x509.NewCertPool()
	roots.AddCert(ca.Certificate())
	loopback := netip.MustParsePrefix("127.0.0.1/32")
	trusting := bootstrap.WithClientTLS(&tls.Config{RootCAs: roots})
	g := guard{
		server: []bootstrap.ServerOption{
			bootstrap.WithTLS(&tls.Config{Certificates: ca.TLS.Certificates}), bootstrap.WithToken("secret"), bootstrap.WithAllowedClients(loopback),
		},
		client: []bootstrap.ClientOption{trusting, bootstrap.WithClientToken("secret")},
	}
	keys := must(nixlkv.NewCurve())
	guarded := []kvreceiver.Option{kvreceiver.WithCurve(keys), kvreceiver.WithAllowedPeers(loopback), kvreceiver.WithSourceMatching()}
	f := newGuardedFleet(t, g,
		[]kvsender.Option{kvsender.WithCurve(keys), kvsender.WithAllowedPeers(loopback), kvsender.WithSourceMatching()},
		append(guarded, kvreceiver.WithBootstrapClient(g.client...)))
	f.move(1)

	soon := kvreceiver.WithConnectTimeout(500 * time.Millisecond)
	for name, opts := range map[string][]bootstrap.ClientOption{
		"no TLS": {bootstrap.WithClientToken("secret")}, "no token": {trusting}, "another token": {trusting, bootstrap.WithClientToken("Secret")},
		"no trust": {bootstrap.WithClientTLS(&tls.Config{}), bootstrap.WithClientToken("secret")},
	} {
		m, _ := f.decode(append(guarded, kvreceiver.WithBootstrapClient(opts...), soon)...)
		r := must(m.Open(2, f.p.addr))
		if err := r.Connect(t.Context()); err == nil {
			t.Errorf("%s: connected", name)
		}
		check(r.Close())
	}
	f.move(3)
	if s := f.p.m.Stats(); len(s.Peers) != 1 {
		t.Errorf("%d peers", len(s.Peers))
	}
}
