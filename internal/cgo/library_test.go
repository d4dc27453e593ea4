package cgo

import (
	"os"
	"slices"
	"testing"
)

// openLibrary skips where there is no NIXL, unless the environment promises one.
func openLibrary(t *testing.T, o Options) *Library {
	t.Helper()
	l, err := Open(o)
	if err != nil {
		if os.Getenv(EnvLibrary) != "" {
			t.Fatal(err)
		}
		t.Skip("skip: no NIXL library on this machine; make test fetches one")
	}
	return l
}

// UCX_HANDLE_ERRORS is overridden in the C environment, where UCX reads it, and whoever set
// it is told. Go's own environment, which child processes get, stays as it is.
func TestHandleErrorsIsOverridden(t *testing.T) {
	const name = "UCX_HANDLE_ERRORS"
	l := openLibrary(t, Options{})
	if got := l.getenv(name); got != "none" {
		t.Errorf("after Open: %q", got)
	}
	was, had := os.LookupEnv(name)
	l.setenv(name, "bt")
	l = openLibrary(t, Options{LogLevel: "error"})
	if got := l.getenv(name); got != "none" {
		t.Errorf("after Open again: %q", got)
	}
	if o := l.Info().Overrode; !slices.Equal(o, []string{name + "=bt"}) {
		t.Errorf("overrode %q", o)
	}
	if now, has := os.LookupEnv(name); now != was || has != had {
		t.Errorf("Go's environment says %q", now)
	}
	if got := l.getenv("UCX_LOG_FILE"); got == "" {
		t.Error("UCX logs to standard output")
	}
	if got := l.getenv("NIXL_LOG_LEVEL"); got != "ERROR" {
		t.Errorf("log level %q", got)
	}
}

func TestInfo(t *testing.T) {
	for _, calls := range []string{"purego", "cgo"} {
		if calls == "cgo" && !haveShim {
			continue
		}
		i := openLibrary(t, Options{Calls: calls}).Info()
		if i.Name != "native" || i.Calls != calls || i.Path == "" {
			t.Errorf("got %+v", i)
		}
	}
}

// The linker finds a library that is loaded already by its name alone. Where it lies, and so
// its version, is told all the same.
func TestInfoByName(t *testing.T) {
	first := openLibrary(t, Options{}).Info()
	l, err := Open(Options{Library: LibraryName})
	if err != nil {
		t.Skipf("skip: the linker does not find the library by its name: %v", err)
	}
	if i := l.Info(); i.Path != first.Path || i.Version != first.Version {
		t.Errorf("got %+v, want %+v", i, first)
	}
}

func TestCStrings(t *testing.T) {
	b := cstring("agent")
	if gostring(addr(b)) != "agent" || len(b) != 6 {
		t.Error("a string did not survive the way to C and back")
	}
	if gostring(0) != "" || string(cstringBytes(addr(cstring("")))) != "" {
		t.Error("empty strings")
	}
}
