// Package releases finds the releases of SGLang that tests can run against.
package releases

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Release is a release of SGLang.
type Release struct {
	Minor int    // 18 of 0.5.18
	Src   string // folder that holds the Python package sglang
}

// String gives the release's version.
func (r Release) String() string { return fmt.Sprintf("0.5.%d", r.Minor) }

// In lists the releases in a folder, oldest first. Each is in a folder called 0.5.18 or 18. It
// is an error if there is none.
func In(folder string) ([]Release, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var found []Release
	for _, e := range entries {
		src := filepath.Join(folder, e.Name())
		minor, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "0.5."))
		if _, statErr := os.Stat(filepath.Join(src, "sglang")); err == nil && statErr == nil {
			found = append(found, Release{minor, src})
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no release of SGLang in %s", folder)
	}
	slices.SortFunc(found, func(a, b Release) int { return cmp.Compare(a.Minor, b.Minor) })
	return found, nil
}
