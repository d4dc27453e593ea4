package releases

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestIn(t *testing.T) {
	folder := t.TempDir()
	if _, err := In(folder); err == nil {
		t.Error("an empty folder holds releases")
	}
	if _, err := In(filepath.Join(folder, "none")); err == nil {
		t.Error("a folder that is not there holds releases")
	}
	for _, path := range []string{"0.5.20/sglang", "9/sglang", "18/sglang", "19/other", "notes/sglang"} {
		if err := os.MkdirAll(filepath.Join(folder, path), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	found, err := In(folder)
	want := []Release{{9, filepath.Join(folder, "9")}, {18, filepath.Join(folder, "18")}, {20, filepath.Join(folder, "0.5.20")}}
	if err != nil || !slices.Equal(found, want) {
		t.Errorf("%v, %v; want %v", found, err, want)
	}
	if s := found[1].String(); s != "0.5.18" {
		t.Errorf("the release calls itself %s", s)
	}
}
