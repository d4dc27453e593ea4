package cgo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Options configure Open. The zero value finds the library and calls it in the fastest
// way that the build has.
type Options struct {
	Library  string // file or folder; empty: see search.candidates
	LogLevel string // NIXL_LOG_LEVEL for this process: TRACE, DEBUG, INFO, WARN, ERROR, FATAL
	Calls    string // "cgo", "purego", or empty for cgo where the build has it
}

// Library is a loaded NIXL. It stays loaded until the process ends: its worker threads and
// exit handlers do not survive being unmapped.
type Library struct {
	info engine.Info
	sym  *table
	libc libc
	hot  hotCalls
}

// libc holds the addresses of the C library's functions that this engine calls itself.
type libc struct{ free, setenv, getenv uintptr }

// Open finds and loads the library. The error is a *NotFoundError when no place served.
func Open(o Options) (*Library, error) {
	l := &Library{}
	var err error
	if l.libc, err = resolveLibc(); err != nil {
		return nil, err
	}
	l.info.Overrode = l.prepareEnv(o.LogLevel)
	path, err := newSearch(o.Library).locate(func(path string) error {
		if err := exists(path); err != nil {
			return err
		}
		return l.load(path)
	})
	if err != nil {
		return nil, err
	}
	if !filepath.IsAbs(path) {
		path = mappedPath(path)
	}
	if l.hot, err = newHotCalls(o.Calls, l.sym); err != nil {
		return nil, err
	}
	l.info.LoadAdds = true
	l.info.Name, l.info.Path, l.info.Version, l.info.Calls = "native", path, wheelVersion(path), l.hot.name()
	return l, nil
}

// Info implements engine.Engine.
func (l *Library) Info() engine.Info { return l.info }

// load opens one file. Absolute paths matter: the library finds its plugins and UCX
// relative to itself.
func (l *Library) load(path string) error {
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return err
	}
	t, err := resolve(h)
	if err != nil {
		return err
	}
	if t[symIsStub] != 0 {
		if r, _, _ := purego.SyscallN(t[symIsStub]); r&0xff != 0 {
			return errors.New("is NIXL's stub library, which moves nothing")
		}
	}
	l.sym = t
	return nil
}

// mappedPath tells which file the dynamic linker took for a name: where it lies, and with it
// the version, is known only after loading. The name itself comes back if it cannot be told.
func mappedPath(name string) string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return name
	}
	for line := range strings.Lines(string(maps)) {
		if at := strings.IndexByte(line, '/'); at >= 0 {
			if path := strings.TrimRight(line[at:], "\n"); filepath.Base(path) == filepath.Base(name) {
				return path
			}
		}
	}
	return name
}

func resolveLibc() (libc, error) {
	var c libc
	for name, addr := range map[string]*uintptr{"free": &c.free, "setenv": &c.setenv, "getenv": &c.getenv} {
		a, err := purego.Dlsym(purego.RTLD_DEFAULT, name)
		if err != nil {
			return c, fmt.Errorf("libc: %s: %w", name, err)
		}
		*addr = a
	}
	return c, nil
}

// prepareEnv sets, in the C environment alone, what the library and UCX read while they
// are loaded. UCX_HANDLE_ERRORS is forced to "none": with any other value UCX replaces the
// handlers of SIGSEGV and others, which Go's runtime needs for itself. It returns what had
// to be overridden, as NAME=old value.
func (l *Library) prepareEnv(logLevel string) []string {
	var overrode []string
	const handlers = "UCX_HANDLE_ERRORS"
	if old := l.getenv(handlers); old != "none" {
		if old != "" {
			overrode = append(overrode, handlers+"="+old)
		}
		l.setenv(handlers, "none")
	}
	// UCX logs to standard output unless told otherwise; that belongs to the program.
	if l.getenv("UCX_LOG_FILE") == "" {
		l.setenv("UCX_LOG_FILE", "stderr")
	}
	if logLevel != "" {
		l.setenv("NIXL_LOG_LEVEL", strings.ToUpper(logLevel))
	}
	return overrode
}

func (l *Library) setenv(name, value string) {
	n, v := cstring(name), cstring(value)
	purego.SyscallN(l.libc.setenv, addr(n), addr(v), 1)
	runtime.KeepAlive(n)
	runtime.KeepAlive(v)
}

func (l *Library) getenv(name string) string {
	n := cstring(name)
	p, _, _ := purego.SyscallN(l.libc.getenv, addr(n))
	runtime.KeepAlive(n)
	return gostring(p)
}

func (l *Library) free(p uintptr) {
	if p != 0 {
		purego.SyscallN(l.libc.free, p)
	}
}
