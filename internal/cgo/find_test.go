package cgo

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// place makes an empty file where the library could be and returns its path.
func place(t *testing.T, elems ...string) string {
	t.Helper()
	p := filepath.Join(append(elems, LibraryName)...)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestCandidateOrder(t *testing.T) {
	root := t.TempDir()
	venv, home, sys, cache := filepath.Join(root, "venv"), filepath.Join(root, "home"), filepath.Join(root, "sys"), filepath.Join(root, "a cache")
	inVenv12 := place(t, venv, "lib", "python3.12", "site-packages", ".nixl_cu12.mesonpy.libs")
	inVenv13 := place(t, venv, "lib", "python3.12", "site-packages", ".nixl_cu13.mesonpy.libs")
	inHome := place(t, home, ".local", "lib", "python3.11", "site-packages", ".nixl_cu12.mesonpy.libs")
	inSys := place(t, sys)
	inCache := place(t, cache, "nixl-cu12-1.5.1", ".nixl_cu12.mesonpy.libs")
	elsewhere := place(t, root, "elsewhere")

	env := map[string]string{"VIRTUAL_ENV": venv, "LD_LIBRARY_PATH": sys + ":relative", EnvCache: cache}
	s := search{getenv: func(k string) string { return env[k] }, home: home, glob: globSorted}
	var found []string
	_, err := s.locate(func(p string) error {
		if err := exists(p); err != nil || !strings.HasPrefix(p, root) {
			return errors.Join(err, errors.New("not one of the test's"))
		}
		found = append(found, p)
		return errors.New("does not load")
	})
	want := []string{inVenv12, inVenv13, inHome, inSys, inCache}
	if !slices.Equal(found, want) {
		t.Errorf("order of places\n got %q\nwant %q", found, want)
	}
	var nf *NotFoundError
	if !errors.As(err, &nf) || !errors.Is(err, ErrLibraryNotFound) {
		t.Fatalf("error %v is no NotFoundError", err)
	}
	for _, p := range append(want, LibraryName, filepath.Join(venv, "lib/python3.12/site-packages/.nixl.mesonpy.libs", LibraryName)) {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("the error does not name %s", p)
		}
	}

	for _, tc := range []struct {
		name, option, env, want string
	}{
		{"option file", elsewhere, inSys, elsewhere},
		{"option folder", filepath.Dir(elsewhere), "", elsewhere},
		{"environment file", "", elsewhere, elsewhere},
		{"environment folder", "", filepath.Dir(elsewhere), elsewhere},
		{"option that is not there", "/nonexistent/x.so", "", "/nonexistent/x.so"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			env[EnvLibrary] = tc.env
			s.explicit = tc.option
			c := s.candidates()
			if len(c) != 1 || c[0].path != tc.want {
				t.Errorf("got %v, want %s alone", c, tc.want)
			}
		})
	}
}

func TestCacheFolder(t *testing.T) {
	for _, tc := range []struct{ env, xdg, home, want string }{
		{"/c", "/x", "/h", "/c"},
		{"", "/x", "/h", "/x/nixlkv"},
		{"", "relative", "/h", "/h/.cache/nixlkv"},
		{"", "", "", ""},
	} {
		env := map[string]string{EnvCache: tc.env, "XDG_CACHE_HOME": tc.xdg}
		s := search{getenv: func(k string) string { return env[k] }, home: tc.home, glob: globSorted}
		if got := s.cacheFolder(); got != tc.want {
			t.Errorf("%+v: got %q", tc, got)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text.so")
	if err := os.WriteFile(text, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"missing":            filepath.Join(t.TempDir(), "no", LibraryName),
		"folder without one": t.TempDir(),
		"text":               text,
		"another library":    "libc.so.6",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(Options{Library: path})
			if !errors.Is(err, ErrLibraryNotFound) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v", err)
			}
		})
	}
	_, err := Open(Options{Library: "libc.so.6"})
	if !errors.Is(err, engine.ErrUnsupported) || !strings.Contains(err.Error(), names[symCreateAgent]) {
		t.Errorf("a library without NIXL's symbols: %v", err)
	}
}

func TestWheelVersion(t *testing.T) {
	site := t.TempDir()
	lib := place(t, site, ".nixl_cu12.mesonpy.libs")
	if got := wheelVersion(lib); got != "" {
		t.Errorf("without metadata: %q", got)
	}
	write := func(dir, text string) {
		if err := os.MkdirAll(filepath.Join(site, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(site, dir, "METADATA"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("nixl_cu13-9.9.dist-info", "Version: 9.9\n\n")
	write("nixl_cu12-1.5.1.dist-info", "Metadata-Version: 2.4\nName: nixl-cu12\nVersion: 1.5.1\n\nVersion: 7\n")
	if got := wheelVersion(lib); got != "1.5.1" {
		t.Errorf("got %q, want 1.5.1", got)
	}
	write("nixl_cu12-1.5.1.dist-info", "Name: nixl-cu12\n\nVersion: 7\n")
	if got := wheelVersion(lib); got != "" {
		t.Errorf("a version in the description counted: %q", got)
	}
	if got := wheelVersion(filepath.Join(site, LibraryName)); got != "" {
		t.Errorf("outside of a wheel: %q", got)
	}
}

func TestOptionalSymbols(t *testing.T) {
	var tb table
	for _, s := range required {
		tb[s] = 1
	}
	if err := tb.has(symListAdd, symStatus); err != nil {
		t.Error(err)
	}
	err := tb.has(symListAdd, symTelemetry)
	if !errors.Is(err, engine.ErrUnsupported) || !strings.Contains(err.Error(), "nixl_capi_get_xfer_telemetry") {
		t.Errorf("got %v", err)
	}
	for i, n := range names {
		if n == "" {
			t.Errorf("symbol %d has no name", i)
		}
	}
}
