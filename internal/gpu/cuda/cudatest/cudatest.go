//go:build linux

// Package cudatest is for tests of what calls the CUDA driver: a driver library without a
// GPU, built with the system's C compiler, and the way to ask for the real one.
package cudatest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

//go:embed testdata/fakecuda.c
var source []byte

// RequireEnv is the environment variable that, when set to anything, makes a test fail
// that would be skipped for want of a GPU.
const RequireEnv = "NIXLKV_TEST_GPU"

// Build compiles a driver library and gives its path. Each macro, such as DEVICES=3,
// changes what it pretends:
//
//	DEVICES=n          it has n devices; 2 by default
//	INIT_RESULT=code   cuInit gives this code
//	MIG=n              the first n devices are MIG instances
//	BAD_DEVICE=n       ordinal n cannot be opened
//	NAMELESS_DEVICE=n  ordinal n fails to give its name
//	UUID_V2_RESULT=code
//	                   cuDeviceGetUuid_v2 gives this code
//	NO_COUNT, NO_UUID_V1, NO_UUID_V2, NO_ALLOC
//	                   a function is missing
//
// Device i is "Fake GPU i" at 0000:(A0+i):00.0 with 1 GiB + i bytes; its GPU's UUID is 16
// bytes of 0x10+i, its MIG instance's 16 bytes of 0xE0+i. The library counts what is
// held, in int fakeAllocations(void), int fakeRetained(int dev), and for the calling
// thread int fakeDepth(void). Every call builds a library of its own. The test is
// skipped where there is no C compiler.
func Build(t testing.TB, macros ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skipf("skip: not tested, no C compiler to build the driver library with: %v", err)
	}
	dir := t.TempDir()
	src, lib := filepath.Join(dir, "fakecuda.c"), filepath.Join(dir, "libfakecuda.so")
	if err := os.WriteFile(src, source, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", lib, src}
	for _, m := range macros {
		args = append(args, "-D"+m)
	}
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", cc, args, err, out)
	}
	return lib
}

// Driver opens the machine's own driver. Without one the test is skipped, or fails if
// [RequireEnv] is set.
func Driver(t testing.TB) *cuda.Driver {
	t.Helper()
	d, err := cuda.Open()
	if err != nil {
		NoGPU(t, err)
	}
	return d
}

// NoGPU ends a test that needs a GPU and met err instead: skipped, or failed if
// [RequireEnv] is set.
func NoGPU(t testing.TB, err error) {
	t.Helper()
	if os.Getenv(RequireEnv) != "" {
		t.Fatalf("%s is set, but there is no GPU: %v", RequireEnv, err)
	}
	t.Skipf("skip: not tested, needs an NVIDIA GPU (set %s to fail instead): %v", RequireEnv, err)
}
