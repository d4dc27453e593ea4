//go:build linux

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
	"github.com/nixlkv/nixlkv/internal/gpu/cuda/cudatest"
)

func fill(b byte) [16]byte { return [16]byte(bytes.Repeat([]byte{b}, 16)) }

func fakeDevice(i int) cuda.Device {
	return cuda.Device{
		Ordinal: i, Name: fmt.Sprintf("Fake GPU %d", i), PCIBusID: fmt.Sprintf("0000:%02X:00.0", 0xa0+i),
		Memory: 1<<30 + uint64(i), UUID: fill(byte(0x10 + i)), GPUUUID: fill(byte(0x10 + i)),
	}
}

func TestDevices(t *testing.T) {
	mig := fakeDevice(0)
	mig.UUID = fill(0xe0)
	migOnlyV2 := mig
	migOnlyV2.GPUUUID = mig.UUID
	nameless := fakeDevice(1)
	nameless.Name = ""
	for _, tc := range []struct {
		name   string
		macros []string
		want   []cuda.Device
		err    string // contained in the error; empty for none
	}{
		{"two", nil, []cuda.Device{fakeDevice(0), fakeDevice(1)}, ""},
		{"none", []string{"DEVICES=0"}, nil, ""},
		{"MIG", []string{"MIG=1"}, []cuda.Device{mig, fakeDevice(1)}, ""},
		{"driver before MIG UUIDs", []string{"MIG=1", "NO_UUID_V2"}, []cuda.Device{fakeDevice(0), fakeDevice(1)}, ""},
		{"driver without the old UUID", []string{"MIG=1", "NO_UUID_V1"}, []cuda.Device{migOnlyV2, fakeDevice(1)}, ""},
		{"failing UUID", []string{"DEVICES=1", "MIG=1", "UUID_V2_RESULT=1"}, []cuda.Device{fakeDevice(0)},
			"CUDA ordinal 0: cuDeviceGetUuid_v2: CUDA_ERROR_INVALID_VALUE (1)"},
		{"no UUID at all", []string{"NO_UUID_V1", "NO_UUID_V2"}, nil, "cuDeviceGetUuid"},
		{"missing function", []string{"NO_COUNT"}, nil, `"cuDeviceGetCount"`},
		{"lost device", []string{"DEVICES=3", "BAD_DEVICE=1"}, []cuda.Device{fakeDevice(0), fakeDevice(2)},
			"CUDA ordinal 1: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)"},
		{"silent device", []string{"NAMELESS_DEVICE=1"}, []cuda.Device{fakeDevice(0), nameless},
			"CUDA ordinal 1: cuDeviceGetName: CUDA result 999"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := cuda.OpenLibrary(cudatest.Build(t, tc.macros...))
			if err != nil {
				t.Fatal(err)
			}
			got, err := d.Devices()
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got  %+v\nwant %+v", got, tc.want)
			}
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
}

func TestOpenFails(t *testing.T) {
	if d, err := cuda.OpenLibrary("libno-such-driver.so.1"); d != nil || !errors.Is(err, cuda.ErrNoDriver) ||
		strings.Count(err.Error(), "libno-such-driver.so.1") != 1 {
		t.Errorf("library that is not there: %v, %v", d, err)
	}
	if d, err := cuda.OpenLibrary("libc.so.6"); d != nil || !errors.Is(err, cuda.ErrNoDriver) ||
		!errors.Is(err, cuda.ErrNoSymbol) || !strings.Contains(err.Error(), `"cuInit"`) {
		t.Errorf("library that is not CUDA's: %v, %v", d, err)
	}
	d, err := cuda.OpenLibrary(cudatest.Build(t, "INIT_RESULT=100"))
	var cudaErr *cuda.Error
	if d != nil || !errors.Is(err, cuda.ErrNoDriver) || !errors.Is(err, cuda.NoDevice) || !errors.As(err, &cudaErr) {
		t.Fatalf("no device: %v, %v", d, err)
	}
	if want := (cuda.Error{Call: "cuInit", Code: 100, Name: "CUDA_ERROR_NO_DEVICE"}); *cudaErr != want {
		t.Errorf("got %+v, want %+v", *cudaErr, want)
	}
	if errors.Is(err, cuda.OutOfMemory) {
		t.Error("one code is another")
	}
}

// TestErrorsTogether loads and fails on many threads at once: the linker's error must
// stay with its thread.
func TestErrorsTogether(t *testing.T) {
	lib := cudatest.Build(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				name := fmt.Sprintf("libno-such-%d-%d.so", i, j)
				if _, err := cuda.OpenLibrary(name); err == nil || strings.Count(err.Error(), name) != 1 || !strings.Contains(err.Error(), "cannot open") {
					t.Errorf("error about %s: %v", name, err)
				}
				d, err := cuda.OpenLibrary(lib)
				if err != nil {
					t.Error(err)
					return
				}
				var f func()
				if err := d.Bind(&f, "cuNoSuch", "cuNoSuchEither"); !errors.Is(err, cuda.ErrNoSymbol) || f != nil {
					t.Errorf("missing function: %v", err)
				}
				if devs, err := d.Devices(); err != nil || len(devs) != 2 {
					t.Errorf("%d devices, %v", len(devs), err)
				}
			}
		})
	}
	wg.Wait()
}

// TestRealDriver lists this machine's GPUs.
func TestRealDriver(t *testing.T) {
	devs, err := cudatest.Driver(t).Devices()
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range devs {
		t.Logf("%+v", d)
		if d.Ordinal != i || d.UUID == [16]byte{} || d.GPUUUID == [16]byte{} || d.Name == "" || d.PCIBusID == "" || d.Memory == 0 {
			t.Errorf("incomplete: %+v", d)
		}
	}
}
