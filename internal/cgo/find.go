package cgo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// LibraryName is the file that is looked for.
const LibraryName = "libnixl_capi.so"

// The variables that the search obeys.
const (
	EnvLibrary = "NIXLKV_NIXL_LIB" // the library's file or folder
	EnvCache   = "NIXLKV_CACHE"    // the project's download cache
)

// wheelFolders are where NIXL's wheels keep the library, beside the Python packages.
var wheelFolders = []string{".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs", ".nixl.mesonpy.libs"}

// ErrLibraryNotFound means that no place holds the library, or none that can be loaded.
var ErrLibraryNotFound = errors.New("NIXL library not found")

// Tried is a place that was looked at, and why it did not serve.
type Tried struct {
	Source string // what led there: "option", "NIXLKV_NIXL_LIB", "python", "system", "cache"
	Path   string
	Err    error
}

// NotFoundError lists every place that was tried. It wraps ErrLibraryNotFound.
type NotFoundError struct{ Tried []Tried }

// Error names each place on a line of its own.
func (e *NotFoundError) Error() string {
	var b strings.Builder
	b.WriteString(ErrLibraryNotFound.Error())
	b.WriteString(" (" + LibraryName + "); tried")
	for _, t := range e.Tried {
		fmt.Fprintf(&b, "\n  %s: %s: %v", t.Source, t.Path, t.Err)
	}
	return b.String()
}

// Unwrap gives ErrLibraryNotFound and the reasons of all places.
func (e *NotFoundError) Unwrap() []error {
	errs := []error{ErrLibraryNotFound}
	for _, t := range e.Tried {
		errs = append(errs, t.Err)
	}
	return errs
}

// candidate is a place where the library may be. A path without a slash is left to the
// dynamic linker.
type candidate struct{ source, path string }

// search says where to look, from the environment it is given.
type search struct {
	explicit string // the caller's choice, file or folder
	getenv   func(string) string
	home     string
	glob     func(pattern string) []string
}

func newSearch(explicit string) search {
	home, _ := os.UserHomeDir() // without a home folder the places below it are left out
	return search{explicit: explicit, getenv: os.Getenv, home: home, glob: globSorted}
}

// globSorted gives the newest first, as far as names tell: python3.12 before python3.9.
func globSorted(pattern string) []string {
	m, _ := filepath.Glob(pattern) // the patterns are ours and well-formed
	slices.SortFunc(m, func(a, b string) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return strings.Compare(b, a)
	})
	return m
}

// candidates lists the places in order. A path chosen by the caller or the environment is
// the only candidate: falling back from it would run another library than was asked for.
func (s search) candidates() []candidate {
	if s.explicit != "" {
		return []candidate{{"option", fileIn(s.explicit)}}
	}
	if p := s.getenv(EnvLibrary); p != "" {
		return []candidate{{EnvLibrary, fileIn(p)}}
	}
	var c []candidate
	for _, dir := range s.pythonFolders() {
		for _, w := range wheelFolders {
			c = append(c, candidate{"python", filepath.Join(dir, w, LibraryName)})
		}
	}
	for _, dir := range s.systemFolders() {
		c = append(c, candidate{"system", filepath.Join(dir, LibraryName)})
	}
	c = append(c, candidate{"system", LibraryName})
	if dir := s.cacheFolder(); dir != "" {
		for _, unpacked := range s.glob(filepath.Join(dir, "nixl-cu1*")) {
			for _, w := range wheelFolders {
				c = append(c, candidate{"cache", filepath.Join(unpacked, w, LibraryName)})
			}
		}
		c = append(c, candidate{"cache", filepath.Join(dir, "nixl-cu12-*", wheelFolders[0], LibraryName)})
	}
	return c
}

// pythonFolders gives the site-packages of the active virtual environment, of PYTHONPATH,
// of the user and of the Pythons on PATH. No Python is run for it.
func (s search) pythonFolders() []string {
	var dirs []string
	add := func(prefix string) {
		if prefix == "" {
			return
		}
		for _, lib := range []string{"lib", "lib64", "local/lib"} {
			dirs = append(dirs, s.glob(filepath.Join(prefix, lib, "python3*", "site-packages"))...)
			dirs = append(dirs, s.glob(filepath.Join(prefix, lib, "python3*", "dist-packages"))...)
		}
	}
	add(s.getenv("VIRTUAL_ENV"))
	add(s.getenv("CONDA_PREFIX"))
	for _, d := range filepath.SplitList(s.getenv("PYTHONPATH")) {
		if filepath.IsAbs(d) {
			dirs = append(dirs, d)
		}
	}
	if s.home != "" {
		add(filepath.Join(s.home, ".local"))
	}
	for _, d := range filepath.SplitList(s.getenv("PATH")) {
		if p, err := filepath.EvalSymlinks(filepath.Join(d, "python3")); err == nil {
			add(filepath.Dir(filepath.Dir(p)))
		}
	}
	add("/usr/local")
	add("/usr")
	return unique(dirs)
}

func (s search) systemFolders() []string {
	dirs := filepath.SplitList(s.getenv("LD_LIBRARY_PATH"))
	dirs = append(dirs, "/opt/nvidia/nvda_nixl/lib64", "/opt/nvidia/nvda_nixl/lib",
		"/usr/local/nixl/lib64", "/usr/local/nixl/lib", "/usr/local/lib", "/usr/lib")
	for _, d := range []string{"/opt/nvidia/nvda_nixl/lib", "/usr/local/nixl/lib", "/usr/local/lib", "/usr/lib"} {
		dirs = append(dirs, s.glob(filepath.Join(d, "*-linux-gnu"))...)
	}
	return unique(slices.DeleteFunc(dirs, func(d string) bool { return !filepath.IsAbs(d) }))
}

func (s search) cacheFolder() string {
	if d := s.getenv(EnvCache); d != "" {
		return d
	}
	if d := s.getenv("XDG_CACHE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "nixlkv")
	}
	if s.home != "" {
		return filepath.Join(s.home, ".cache", "nixlkv")
	}
	return ""
}

// fileIn turns a folder into the library's path in it. What is not a folder, or not
// there, stays as it is, so that the error names what was asked for.
func fileIn(path string) string {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return filepath.Join(path, LibraryName)
	}
	return path
}

func unique(dirs []string) []string {
	seen := make(map[string]bool, len(dirs))
	out := dirs[:0]
	for _, d := range dirs {
		if d = filepath.Clean(d); !seen[d] {
			seen[d] = true
			out = append(out, d)
		}
	}
	return out
}

// locate hands each place to try in turn and gives the first that succeeds;
// "libnixl_capi.so" alone means that the dynamic linker shall find it. The error lists every
// place.
func (s search) locate(try func(path string) error) (string, error) {
	var tried []Tried
	for _, c := range s.candidates() {
		err := try(c.path)
		if err == nil {
			return c.path, nil
		}
		tried = append(tried, Tried{c.source, c.path, err})
	}
	return "", &NotFoundError{tried}
}

// exists tells a missing file apart from one that cannot be loaded, without loading it.
func exists(path string) error {
	if !strings.Contains(path, "/") {
		return nil
	}
	st, err := os.Stat(path)
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			return pe.Err
		}
		return err
	}
	if st.IsDir() {
		return errors.New("is a folder")
	}
	return nil
}
