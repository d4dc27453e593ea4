package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/nixlkv/nixlkv/nixl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	for _, kind := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(kind.String(), func(t *testing.T) {
			if kind == nixl.Native && os.Getenv("NIXLKV_NIXL_LIB") == "" {
				t.Skip("skip: no NIXL library in NIXLKV_NIXL_LIB; make test fetches one")
			}
			var out strings.Builder
			if err := run(t.Context(), &out, kind); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("room 4711 over the %v engine: 3 pages of 4 regions arrived, and first token 9906\n", kind)
			if out.String() != want {
				t.Errorf("got %q, want %q", out.String(), want)
			}
		})
	}
}

// The README shows a part of this program, to the letter.
func TestREADME(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(readme), "```go\n")
	snippet, _, closed := strings.Cut(rest, "```\n")
	if !found || !closed || !strings.Contains(string(source), snippet) {
		t.Errorf("not in main.go:\n%s", snippet)
	}
}
