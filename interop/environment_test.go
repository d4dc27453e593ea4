package interop

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

// release is a release of SGLang.
type release struct {
	minor int    // 18 of 0.5.18
	src   string // folder that holds sglang
}

func (r release) String() string { return fmt.Sprintf("0.5.%d", r.minor) }

// readsStatus says whether its decode reads KV_STATUS, by which a prefill tells that a room
// has failed. Earlier ones wait until their patience ends.
func (r release) readsStatus() bool { return r.minor >= 20 }

// environment is what the tests need and the machine has.
type environment struct {
	python   string
	releases []release // oldest first
	kvpeer   string    // the program
}

// need gives the environment, or ends the test where something of it is not there.
func need(t *testing.T) environment {
	t.Helper()
	return needs(t, theEnvironment)
}

// needEngine is need without SGLang: all that is needed is a NIXL engine.
func needEngine(t *testing.T, kind nixl.Kind) environment {
	t.Helper()
	return needs(t, func() (env environment, err error) {
		if kind == nixl.Native {
			if err := theLibrary(); err != nil {
				return env, err
			}
		}
		env.kvpeer, err = kvpeer()
		return env, err
	})
}

func needs(t *testing.T, find func() (environment, error)) environment {
	t.Helper()
	env, err := find()
	var absent *absentError
	switch {
	case err == nil:
		return env
	case errors.As(err, &absent) && os.Getenv("CI") != "true" && os.Getenv("NIXLKV_REQUIRE_PEERS") != "1":
		t.Skip("skip: " + absent.what)
	default:
		t.Fatal(err)
	}
	panic("unreachable")
}

// absentError: something is not on this machine, which is no fault.
type absentError struct{ what string }

func (e *absentError) Error() string { return e.what }

var theEnvironment = sync.OnceValues(func() (environment, error) {
	env := environment{python: os.Getenv("PEER_PYTHON")}
	root := os.Getenv("SGLANG_SRC")
	if env.python == "" || root == "" {
		return env, &absentError{"PEER_PYTHON and SGLANG_SRC are not set, so SGLang is not there to be tested against (make test fetches it)"}
	}
	err := theLibrary()
	if err != nil {
		return env, err
	}
	if env.releases, err = findReleases(root); err != nil {
		return env, err
	}
	env.kvpeer, err = kvpeer()
	return env, err
})

// theLibrary finds NIXL.
var theLibrary = sync.OnceValue(func() error {
	engine, err := nixl.Open(nixl.Native)
	switch {
	case errors.Is(err, nixl.ErrLibraryNotFound) && os.Getenv("NIXLKV_NIXL_LIB") == "":
		return &absentError{"there is no NIXL library on this machine (make test fetches one)"}
	case err != nil:
		return err
	}
	return engine.Close()
})

// only gives those releases of some numbers that are there.
func (e environment) only(minors ...int) []release {
	return slices.DeleteFunc(slices.Clone(e.releases), func(r release) bool { return !slices.Contains(minors, r.minor) })
}

// findReleases lists the releases in a folder, which call them 0.5.18 or 18.
func findReleases(root string) ([]release, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	var found []release
	for _, e := range entries {
		src := filepath.Join(root, e.Name())
		minor, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "0.5."))
		if _, statErr := os.Stat(filepath.Join(src, "sglang")); err == nil && statErr == nil {
			found = append(found, release{minor, src})
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no release of SGLang in %s", root)
	}
	slices.SortFunc(found, func(a, b release) int { return cmp.Compare(a.minor, b.minor) })
	return found, nil
}

// kvpeer builds the program once for all tests, with the race detector if they have it.
var kvpeer = sync.OnceValues(func() (string, error) {
	program := filepath.Join(scratch, "kvpeer")
	args := []string{"build", "-o", program}
	if raceDetector {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "../examples/kvpeer")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building kvpeer: %w\n%s", err, out)
	}
	return program, nil
})
