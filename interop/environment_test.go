package interop

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/nixlkv/nixlkv/internal/testkit/releases"
	"github.com/nixlkv/nixlkv/nixl"
)

// release is a release of SGLang.
type release = releases.Release

// readsStatus says whether a release's decode reads KV_STATUS, by which a prefill tells that a
// room has failed. Earlier ones wait until their patience ends.
func readsStatus(r release) bool { return r.Minor >= 20 }

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
	if env.releases, err = releases.In(root); err != nil {
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
	return slices.DeleteFunc(slices.Clone(e.releases), func(r release) bool { return !slices.Contains(minors, r.Minor) })
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
