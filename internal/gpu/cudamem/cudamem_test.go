//go:build linux

package cudamem_test

import (
	"bytes"
	"errors"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
	"github.com/nixlkv/nixlkv/internal/gpu/cuda/cudatest"
	"github.com/nixlkv/nixlkv/internal/gpu/cudamem"
)

// fake is the driver library of package cudatest, and what it counts.
type fake struct {
	*cuda.Driver
	allocations func() int32
	retained    func(dev int32) int32
	depth       func() int32
}

func newFake(t *testing.T, macros ...string) *fake {
	t.Helper()
	d, err := cuda.OpenLibrary(cudatest.Build(t, macros...))
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{Driver: d}
	if err := errors.Join(
		d.Bind(&f.allocations, "fakeAllocations"),
		d.Bind(&f.retained, "fakeRetained"),
		d.Bind(&f.depth, "fakeDepth"),
	); err != nil {
		t.Fatal(err)
	}
	return f
}

func newContext(t *testing.T, d *cuda.Driver, ordinal int) *cudamem.Context {
	t.Helper()
	c, err := cudamem.New(d, ordinal)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, cudamem.ErrClosed) {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

func mustAlloc(t *testing.T, c *cudamem.Context, size int) *cudamem.Memory {
	t.Helper()
	m, err := c.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestNewRefuses(t *testing.T) {
	f := newFake(t)
	for _, ordinal := range []int{-1, math.MinInt, math.MaxInt32 + 1} {
		if c, err := cudamem.New(f.Driver, ordinal); c != nil || !errors.Is(err, cudamem.ErrOrdinal) {
			t.Errorf("ordinal %d: %v, %v", ordinal, c, err)
		}
	}
	c, err := cudamem.New(f.Driver, 2)
	if c != nil || !errors.Is(err, cuda.InvalidDevice) || !strings.Contains(err.Error(), "CUDA ordinal 2: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)") {
		t.Errorf("a third device of two: %v, %v", c, err)
	}
	g := newFake(t, "NO_ALLOC")
	if c, err := cudamem.New(g.Driver, 0); c != nil || !errors.Is(err, cuda.ErrNoSymbol) || !strings.Contains(err.Error(), `"cuMemAlloc_v2"`) {
		t.Errorf("driver without cuMemAlloc_v2: %v, %v", c, err)
	}
	if n := f.retained(0) + f.retained(1) + g.retained(0); n != 0 {
		t.Errorf("%d contexts stay retained", n)
	}
}

func TestLifetimes(t *testing.T) {
	f := newFake(t)
	c := newContext(t, f.Driver, 1)
	if f.retained(0) != 0 || f.retained(1) != 1 || c.Ordinal() != 1 {
		t.Fatalf("retained %d and %d, ordinal %d", f.retained(0), f.retained(1), c.Ordinal())
	}
	for _, size := range []int{0, -1, math.MinInt} {
		if m, err := c.Alloc(size); m != nil || !errors.Is(err, cudamem.ErrSize) {
			t.Errorf("Alloc(%d): %v, %v", size, m, err)
		}
	}
	if m, err := c.Alloc(math.MaxInt); m != nil || !errors.Is(err, cuda.OutOfMemory) ||
		!strings.Contains(err.Error(), "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)") {
		t.Errorf("Alloc of everything: %v, %v", m, err)
	}
	m := mustAlloc(t, c, 10)
	if m.Addr() == 0 || m.Len() != 10 || m.Ordinal() != 1 || f.allocations() != 1 {
		t.Errorf("addr %#x, len %d, ordinal %d, %d allocations", m.Addr(), m.Len(), m.Ordinal(), f.allocations())
	}
	if err := c.Close(); !errors.Is(err, cudamem.ErrInUse) || f.retained(1) != 1 {
		t.Errorf("Close with memory: %v, retained %d", err, f.retained(1))
	}
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	if err := m.Free(); !errors.Is(err, cudamem.ErrClosed) || f.allocations() != 0 {
		t.Errorf("second Free: %v, %d allocations", err, f.allocations())
	}
	if _, err := m.WriteAt([]byte{1}, 0); !errors.Is(err, cudamem.ErrClosed) {
		t.Errorf("write into freed memory: %v", err)
	}
	if _, err := m.ReadAt([]byte{1}, 0); !errors.Is(err, cudamem.ErrClosed) {
		t.Errorf("read of freed memory: %v", err)
	}
	if err := c.Close(); err != nil || f.retained(1) != 0 {
		t.Errorf("Close: %v, retained %d", err, f.retained(1))
	}
	for name, call := range map[string]func() error{
		"Close": c.Close, "Sync": c.Sync, "MakeCurrent": c.MakeCurrent,
		"Alloc": func() error { _, err := c.Alloc(1); return err },
	} {
		if err := call(); !errors.Is(err, cudamem.ErrClosed) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
}

func TestRanges(t *testing.T) {
	c := newContext(t, newFake(t).Driver, 0)
	m := mustAlloc(t, c, 10)
	defer m.Free()
	if _, err := m.WriteAt([]byte("0123456789"), 0); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		len  int
		off  int64
		want error
	}{
		{0, 0, nil}, {0, 10, nil}, {1, 9, nil}, {10, 0, nil},
		{1, 10, cudamem.ErrRange}, {11, 0, cudamem.ErrRange}, {2, 9, cudamem.ErrRange},
		{1, -1, cudamem.ErrRange}, {1, math.MinInt64, cudamem.ErrRange},
		{0, 11, cudamem.ErrRange}, {1, math.MaxInt64, cudamem.ErrRange},
	} {
		p := bytes.Repeat([]byte{'x'}, tc.len)
		n, err := m.WriteAt(p, tc.off)
		if !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) || (err == nil && n != tc.len) || (err != nil && n != 0) {
			t.Errorf("write of %d at %d: %d, %v, want %v", tc.len, tc.off, n, err, tc.want)
		}
	}
	if _, err := m.WriteAt([]byte("0123456789"), 0); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		len  int
		off  int64
		got  string
		want error
	}{
		{10, 0, "0123456789", nil}, {3, 7, "789", nil}, {4, 7, "789", io.EOF},
		{0, 10, "", nil}, {1, 10, "", io.EOF}, {1, math.MaxInt64, "", io.EOF},
		{1, -1, "", cudamem.ErrRange}, {1, math.MinInt64, "", cudamem.ErrRange},
	} {
		p := make([]byte, tc.len)
		n, err := m.ReadAt(p, tc.off)
		if string(p[:n]) != tc.got || !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
			t.Errorf("read of %d at %d: %q, %v, want %q, %v", tc.len, tc.off, p[:n], err, tc.got, tc.want)
		}
	}
}

// TestThreads calls from many goroutines that change threads. The driver library refuses
// a call on a thread where the context is not current.
func TestThreads(t *testing.T) {
	f := newFake(t)
	contexts := []*cudamem.Context{newContext(t, f.Driver, 0), newContext(t, f.Driver, 1)}
	checkRoundTrips(t, contexts, 50)
	if n := f.allocations(); n != 0 {
		t.Errorf("%d allocations left", n)
	}
}

func checkRoundTrips(t *testing.T, contexts []*cudamem.Context, rounds int) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			c := contexts[i%len(contexts)]
			for j := range rounds {
				want := bytes.Repeat([]byte{byte(i), byte(j), 0xff}, 1000+j)
				m, err := c.Alloc(len(want))
				if err != nil {
					t.Error(err)
					return
				}
				runtime.Gosched()
				got := make([]byte, len(want))
				_, werr := m.WriteAt(want, 0)
				_, rerr := m.ReadAt(got, 0)
				if err := errors.Join(werr, rerr, c.Sync(), m.Free()); err != nil || !bytes.Equal(got, want) {
					t.Errorf("round %d: %v, equal %v", j, err, bytes.Equal(got, want))
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestThreadGetsItsContextBack calls while another context is current.
func TestThreadGetsItsContextBack(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f := newFake(t)
	zero, one := newContext(t, f.Driver, 0), newContext(t, f.Driver, 1)
	var synchronize func() cuda.Code
	var getCurrent func(*uintptr) cuda.Code // the top of the stack, taken off
	if err := errors.Join(f.Bind(&synchronize, "cuCtxSynchronize"), f.Bind(&getCurrent, "cuCtxPopCurrent_v2")); err != nil {
		t.Fatal(err)
	}
	if err := zero.Sync(); err != nil {
		t.Fatal(err)
	}
	if f.depth() != 0 || synchronize() != cuda.InvalidContext {
		t.Errorf("a call left %d contexts on the thread", f.depth())
	}
	if err := zero.MakeCurrent(); err != nil {
		t.Fatal(err)
	}
	m := mustAlloc(t, one, 1)
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	if f.depth() != 1 || synchronize() != cuda.Success {
		t.Errorf("%d contexts on the thread, synchronize gives %v", f.depth(), synchronize())
	}
	var top uintptr
	if getCurrent(&top) != cuda.Success || top != 1 { // the library's word for device 0
		t.Errorf("context %d is current", top)
	}
}

// TestMemoryProperty compares the memory with a slice under random writes and reads.
func TestMemoryProperty(t *testing.T) {
	c := newContext(t, newFake(t).Driver, 0)
	rapid.Check(t, func(t *rapid.T) {
		model := make([]byte, rapid.IntRange(1, 64).Draw(t, "size"))
		m, err := c.Alloc(len(model))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := m.Free(); err != nil {
				t.Fatal(err)
			}
		}()
		if _, err := m.WriteAt(model, 0); err != nil {
			t.Fatal(err)
		}
		offset := rapid.Int64Range(-2, 70)
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) {
				p, off := rapid.SliceOfN(rapid.Byte(), 0, 70).Draw(t, "p"), offset.Draw(t, "off")
				fits := off >= 0 && off+int64(len(p)) <= int64(len(model))
				n, err := m.WriteAt(p, off)
				if fits != (err == nil) || (fits && n != len(p)) {
					t.Fatalf("write of %d at %d into %d: %d, %v", len(p), off, len(model), n, err)
				}
				if fits {
					copy(model[off:], p)
				}
			},
			"read": func(t *rapid.T) {
				p, off := make([]byte, rapid.IntRange(0, 70).Draw(t, "len")), offset.Draw(t, "off")
				got, gotErr := m.ReadAt(p, off)
				if off < 0 {
					if !errors.Is(gotErr, cudamem.ErrRange) {
						t.Fatalf("read at %d: %v", off, gotErr)
					}
					return
				}
				want := model[min(off, int64(len(model))):]
				want = want[:min(len(want), len(p))]
				if !slices.Equal(p[:got], want) || (gotErr == io.EOF) != (len(want) < len(p)) {
					t.Fatalf("read of %d at %d: %x, %v, want %x", len(p), off, p[:got], gotErr, want)
				}
			},
		})
	})
}

func TestOpenWithoutDriver(t *testing.T) {
	if _, err := cuda.Open(); err == nil {
		t.Skip("skip: not tested, needs a machine without an NVIDIA driver")
	}
	if c, err := cudamem.Open(0); c != nil || !errors.Is(err, cuda.ErrNoDriver) {
		t.Errorf("Open: %v, %v", c, err)
	}
}

// TestRealGPU does on every GPU of this machine what TestThreads does without one.
func TestRealGPU(t *testing.T) {
	d := cudatest.Driver(t)
	devices, err := d.Devices()
	if err != nil {
		t.Fatal(err)
	}
	if len(devices) == 0 {
		cudatest.NoGPU(t, errors.New("the driver lists no device"))
	}
	var contexts []*cudamem.Context
	for _, dev := range devices {
		contexts = append(contexts, newContext(t, d, dev.Ordinal))
	}
	checkRoundTrips(t, contexts, 20)

	const size = 64<<20 + 3
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	for _, c := range contexts {
		m := mustAlloc(t, c, size)
		if m.Addr()%256 != 0 {
			t.Errorf("ordinal %d: address %#x", c.Ordinal(), m.Addr())
		}
		got := make([]byte, size)
		_, werr := m.WriteAt(want, 0)
		_, rerr := m.ReadAt(got, 0)
		if err := errors.Join(werr, rerr, m.Free()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("ordinal %d: %v, equal %v", c.Ordinal(), err, bytes.Equal(got, want))
		}
	}
	if c, err := cudamem.New(d, len(devices)); c != nil || !errors.Is(err, cuda.InvalidDevice) {
		t.Errorf("one ordinal too many: %v, %v", c, err)
	}
	if m, err := contexts[0].Alloc(1 << 50); m != nil || !errors.Is(err, cuda.OutOfMemory) {
		t.Errorf("a pebibyte: %v, %v", m, err)
	}
}
