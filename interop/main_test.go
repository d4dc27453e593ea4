package interop

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

var (
	update  = flag.Bool("update", false, "let SGLang's own pairs write testdata/golden")
	scratch string // a folder for as long as the tests run
)

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "nixlkv-interop-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(scratch)
		os.Exit(code)
	}))
}
