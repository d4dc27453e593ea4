package cgo

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
)

// wheelVersion tells the library's version from the metadata that its wheel leaves beside
// it: <site-packages>/.nixl_cu12.mesonpy.libs/libnixl_capi.so belongs to
// <site-packages>/nixl_cu12-1.5.1.dist-info/METADATA. The C API itself tells none. Empty
// where the library does not come from a wheel.
func wheelVersion(path string) string {
	folder := filepath.Base(filepath.Dir(path))
	name, ok := strings.CutPrefix(folder, ".")
	if !ok {
		return ""
	}
	name, ok = strings.CutSuffix(name, ".mesonpy.libs")
	if !ok {
		return ""
	}
	site := filepath.Dir(filepath.Dir(path))
	for _, f := range globSorted(filepath.Join(site, name+"-*.dist-info", "METADATA")) {
		if v := metadataVersion(f); v != "" {
			return v
		}
	}
	return ""
}

// metadataVersion reads the Version header of a wheel's METADATA file.
func metadataVersion(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan() && s.Text() != ""; {
		if v, ok := strings.CutPrefix(s.Text(), "Version:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
