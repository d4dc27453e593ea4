//go:build linux

package gpu

import (
	"errors"
	"strings"
	"testing"
	"testing/fstest"
)

const (
	textA = "00112233-4455-6677-8899-aabbccddeeff"
	textB = "ffeeddcc-bbaa-9988-7766-554433221100"
)

var idA = uuid{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}

func TestParseUUID(t *testing.T) {
	for _, tc := range []struct {
		text string
		kind uuidKind
		ok   bool
	}{
		{"GPU-" + textA, gpuUUID, true},
		{"GPU-" + strings.ToUpper(textA), gpuUUID, true},
		{"MIG-" + textA, migUUID, true},
		{"MIG-GPU-" + textA + "/1/0", legacyMIGUUID, true},
		{"MIG-GPU-" + textA + "/12/3", legacyMIGUUID, true},
		{"", 0, false},
		{textA, 0, false},
		{"GPU-", 0, false},
		{"gpu-" + textA, 0, false},
		{"GPU-" + textA + "0", 0, false},
		{"GPU-" + textA[1:], 0, false},
		{"GPU-" + textA + "/1/0", 0, false},
		{"GPU-0011223344556677-8899-aabb-ccddeeff", 0, false},
		{"GPU-g" + textA[1:], 0, false},
		{"GPU-00000000-0000-0000-0000-000000000000", 0, false},
		{"MIG-GPU-" + textA, 0, false},
		{"MIG-GPU-" + textA + "/1", 0, false},
		{"MIG-GPU-" + textA + "/1/", 0, false},
		{"MIG-GPU-" + textA + "/1/x", 0, false},
		{"MIG-GPU-" + textA + "/1/0/0", 0, false},
	} {
		id, kind, err := parseUUID(tc.text)
		if !tc.ok {
			if !errors.Is(err, errUUID) || id != (uuid{}) {
				t.Errorf("%q: %x, %v", tc.text, id, err)
			}
			continue
		}
		if err != nil || id != idA || kind != tc.kind {
			t.Errorf("%q: %x, kind %d, %v", tc.text, id, kind, err)
		}
	}
	if got := idA.text(gpuUUID); got != "GPU-"+textA {
		t.Error(got)
	}
	if got := idA.text(migUUID); got != "MIG-"+textA {
		t.Error(got)
	}
	if got := (uuid{}).text(gpuUUID); got != "" {
		t.Error(got)
	}
}

func FuzzParseUUID(f *testing.F) {
	for _, s := range []string{"GPU-" + textA, "MIG-" + textB, "MIG-GPU-" + textA + "/1/0", "GPU-", "MIG-GPU-/", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, kind, err := parseUUID(s)
		if err != nil {
			return
		}
		if id == (uuid{}) {
			t.Fatalf("%q is no UUID", s)
		}
		text := id.text(kind)
		if kind == legacyMIGUUID {
			text = "MIG-" + text
			s, _, _ = strings.Cut(s, "/")
		}
		if !strings.EqualFold(text, s) {
			t.Fatalf("%q reads as %q", s, text)
		}
	})
}

func TestCanonicalPCI(t *testing.T) {
	for text, want := range map[string]string{
		"0000:3B:00.0":     "0000:3b:00.0",
		"00000000:3B:00.0": "0000:3b:00.0",
		"00010000:AF:1F.7": "10000:af:1f.7",
		"0:1:2.3":          "0000:01:02.3",
	} {
		if got, err := canonicalPCI(text); got != want || err != nil {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "3b:00.0", "0000:3b:00", "0000:3b:00.8", "0000:3b:20.0", "0000:100:00.0", "100000000:3b:00.0",
		"0000:3b:00.0 ", "0000:3b:-1.0", "0000:3b:00.0.0", "../../etc:0:0.0", ":::.", "0000:3b:0x1.0", "0000:3b:0_1.0",
	} {
		if got, err := canonicalPCI(text); got != "" || !errors.Is(err, errPCIBusID) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

func FuzzCanonicalPCI(f *testing.F) {
	for _, s := range []string{"0000:3B:00.0", "00010000:af:1f.7", "0:0:0.0", ":::.", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := canonicalPCI(s)
		if err != nil {
			return
		}
		if again, err := canonicalPCI(got); again != got || err != nil {
			t.Fatalf("%q gives %q, which gives %q, %v", s, got, again, err)
		}
		if len(got) < len("0000:00:00.0") || strings.ContainsAny(got, "/ \x00") {
			t.Fatalf("%q gives %q", s, got)
		}
	})
}

func TestNUMANode(t *testing.T) {
	sysfs := fstest.MapFS{
		"0000:3b:00.0/numa_node":  {Data: []byte("1\n")},
		"0000:3c:00.0/numa_node":  {Data: []byte("-1\n")},
		"0000:3d:00.0/numa_node":  {Data: []byte("node\n")},
		"0000:3e:00.0/numa_node":  {Data: []byte("")},
		"10000:01:00.0/numa_node": {Data: []byte("0\n")},
	}
	for pci, want := range map[string]int{
		"0000:3b:00.0": 1, "10000:01:00.0": 0,
		"0000:3c:00.0": Unknown, "0000:3d:00.0": Unknown, "0000:3e:00.0": Unknown, "0000:3f:00.0": Unknown, "": Unknown,
	} {
		if got := numaNode(sysfs, pci); got != want {
			t.Errorf("%q: node %d, want %d", pci, got, want)
		}
	}
}
