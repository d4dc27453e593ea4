package embedded

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func TestParams(t *testing.T) {
	cases := []struct {
		name   string
		params map[string]string
		want   tcpConfig
		says   string // of the error
	}{
		{"none", nil, tcpConfig{timeout: defaultTCPTimeout}, ""},
		{"all", map[string]string{
			ParamListen: "127.0.0.1:0", ParamAdvertise: "10.0.0.1, host:7000,[2001:db8::1]:0,2001:db8::2", ParamTimeout: "3s", ParamTransport: "tcp",
		}, tcpConfig{
			listen: "127.0.0.1:0", timeout: 3 * time.Second, transport: transportTCP,
			advertise: []string{"10.0.0.1:0", "host:7000", "[2001:db8::1]:0", "[2001:db8::2]:0"},
		}, ""},
		{"unix", map[string]string{ParamTransport: "unix"}, tcpConfig{timeout: defaultTCPTimeout, transport: transportUnix}, ""},
		{"listen without port", map[string]string{ParamListen: "10.0.0.1"}, tcpConfig{}, "missing port"},
		{"advertise alone", map[string]string{ParamAdvertise: "10.0.0.1"}, tcpConfig{}, "without tcp_listen"},
		{"too many", map[string]string{ParamListen: ":0", ParamAdvertise: strings.Repeat("a,", maxTCPAddresses) + "a"}, tcpConfig{}, "more than 8"},
		{"no duration", map[string]string{ParamTimeout: "10"}, tcpConfig{}, "missing unit"},
		{"too short", map[string]string{ParamTimeout: "1ms"}, tcpConfig{}, "not between"},
		{"too long", map[string]string{ParamTimeout: "9999h"}, tcpConfig{}, "not between"},
		{"transport", map[string]string{ParamTransport: "rdma"}, tcpConfig{}, `"auto" "unix" "tcp"`},
		{"unknown", map[string]string{"tcp_listne": "x"}, tcpConfig{}, "not known"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseParams(pluginName, c.params)
			if c.says != "" {
				wantErr(t, err, engine.ErrInvalidParam)
				if !strings.Contains(err.Error(), c.says) {
					t.Fatalf("error %q does not say %q", err, c.says)
				}
				return
			}
			if err != nil || got.listen != c.want.listen || got.timeout != c.want.timeout || got.transport != c.want.transport || !slices.Equal(got.advertise, c.want.advertise) {
				t.Fatalf("%+v, %v; want %+v", got, err, c.want)
			}
		})
	}
	if _, err := parseParams(pluginAlias, map[string]string{"num_threads": "8"}); err != nil {
		t.Fatalf("a parameter of NIXL's backend: %v", err)
	}
}

// TestAdvertised: what an agent listens on is what its metadata says, unless it is told
// otherwise; and by default it is nothing.
func TestAdvertised(t *testing.T) {
	cases := []struct {
		name              string
		listen, advertise string
		want              []string // PORT stands for the one listened on
		err               error
	}{
		{"nothing", "", "", nil, nil},
		{"as bound", "127.0.0.1:0", "", []string{"127.0.0.1:PORT"}, nil},
		{"other host", "127.0.0.1:0", "10.1.2.3,name.example:7", []string{"10.1.2.3:PORT", "name.example:7"}, nil},
		{"wildcard with a name", "0.0.0.0:0", "10.1.2.3", []string{"10.1.2.3:PORT"}, nil},
		{"wildcard alone", "0.0.0.0:0", "", nil, engine.ErrInvalidParam},
		{"all addresses alone", ":0", "", nil, engine.ErrInvalidParam},
		{"wildcard advertised", "127.0.0.1:0", "0.0.0.0", nil, engine.ErrInvalidParam},
		{"bad port advertised", "127.0.0.1:0", "a:x", nil, engine.ErrInvalidParam},
		{"not an address of this host", "192.0.2.1:0", "", nil, engine.ErrBackend},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			made, err := New().NewAgent("a", engine.AgentConfig{})
			if err != nil {
				t.Fatal(err)
			}
			a := made.(*Agent)
			t.Cleanup(func() {
				if err := a.Destroy(); err != nil {
					t.Error(err)
				}
			})
			_, err = a.CreateBackend(pluginName, map[string]string{ParamListen: c.listen, ParamAdvertise: c.advertise})
			if c.err != nil {
				wantErr(t, err, c.err)
				// Nothing stays open, and another try may follow.
				_, err = a.CreateBackend(pluginName, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			md, err := a.LocalMetadata()
			if err != nil {
				t.Fatal(err)
			}
			m, err := parseMetadata(md)
			if err != nil {
				t.Fatal(err)
			}
			want := slices.Clone(c.want)
			if len(a.listeners) == 2 {
				_, port, err := net.SplitHostPort(a.listeners[1].Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				for i := range want {
					want[i] = strings.Replace(want[i], "PORT", port, 1)
				}
			}
			if !slices.Equal(m.tcp, want) {
				t.Fatalf("metadata says %q, want %q", m.tcp, want)
			}
			params, _, err := a.BackendParams(backendHandle)
			if err != nil || params[ParamAdvertise] != strings.Join(want, ",") || params[ParamTimeout] != "10s" {
				t.Fatalf("parameters %v, %v", params, err)
			}
		})
	}
}

// TestReach says which way is taken to whom.
func TestReach(t *testing.T) {
	here, elsewhere := hostID{boot: [16]byte{1}}, hostID{boot: [16]byte{2}}
	tcp := []string{"10.0.0.1:1"}
	cases := []struct {
		name string
		by   transport
		m    metadata
		want addresses
		says string
	}{
		{"here", transportAuto, metadata{host: here, address: "@a"}, addresses{unix: "@a"}, ""},
		{"here and by TCP", transportAuto, metadata{host: here, address: "@a", tcp: tcp}, addresses{"@a", tcp}, ""},
		{"here, TCP only", transportTCP, metadata{host: here, address: "@a", tcp: tcp}, addresses{tcp: tcp}, ""},
		{"here, Unix only", transportUnix, metadata{host: here, address: "@a", tcp: tcp}, addresses{unix: "@a"}, ""},
		{"here, TCP only, none", transportTCP, metadata{host: here, address: "@a"}, addresses{}, "uses TCP only"},
		{"elsewhere", transportAuto, metadata{host: elsewhere, address: "@a", tcp: tcp}, addresses{tcp: tcp}, ""},
		{"elsewhere, none", transportAuto, metadata{host: elsewhere, address: "@a"}, addresses{}, ParamListen},
		{"elsewhere, Unix only", transportUnix, metadata{host: elsewhere, address: "@a", tcp: tcp}, addresses{}, ParamTransport},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := &Agent{host: here, tcp: tcpConfig{transport: c.by}}
			got, err := a.reach(&c.m)
			if c.says != "" {
				wantErr(t, err, ErrOtherHost, engine.ErrUnsupported)
				if !strings.Contains(err.Error(), c.says) {
					t.Fatalf("error %q does not say %q", err, c.says)
				}
				return
			}
			if err != nil || got.unix != c.want.unix || !slices.Equal(got.tcp, c.want.tcp) {
				t.Fatalf("%+v, %v", got, err)
			}
		})
	}
}

// TestNextWay: an agent that does not answer on one address is tried on the next. That its
// Unix socket is not here happens when two hosts cannot be told apart.
func TestNextWay(t *testing.T) {
	const size = 1 << 20
	a := newTestAgent(t, "a", engine.AgentConfig{})
	b := tcpKind.agent(t, "b", engine.AgentConfig{})
	local, mem := foreign(t, size), shared(t, size)
	register(t, a, local)
	register(t, b, mem)
	md, err := b.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	m, err := parseMetadata(md)
	if err != nil {
		t.Fatal(err)
	}
	// A port on which nobody listens: of a listener that is closed.
	l, err := listenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	l.Close()
	good := m.tcp
	m.address = "@nixlkv-embedded-not-here"
	m.tcp = append([]string{nobody}, good...)
	fill(local.data, 1)
	spec := engine.Spec{
		Op: engine.Write, Remote: loadBytes(t, a, m.encode()), Post: true, HasNotif: true,
		LocalList: newList(t, a, local.pages(4096)...), RemoteList: newList(t, a, mem.pages(4096)...),
	}
	mustSucceed(t, a, transfer(t, a, spec))
	wantBytes(t, mem.data, local.data)
	notes(t, b, 1)
	if err := a.InvalidateRemote(spec.Remote); err != nil {
		t.Fatal(err)
	}
	// The error says all that was tried.
	m.tcp = []string{nobody}
	err = a.Connect(loadBytes(t, a, m.encode()))
	wantErr(t, err, engine.ErrPeerLost)
	var dial *net.OpError
	if !errors.As(err, &dial) || !strings.Contains(err.Error(), m.address) || !strings.Contains(err.Error(), nobody) {
		t.Fatalf("the error does not say what was tried: %v", err)
	}
}
