package main

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

func TestDefaults(t *testing.T) {
	t.Setenv("NIXL_LOG_LEVEL", "")
	c, err := parseFlags(nil)
	want := config{role: roleBoth, bootstrap: "127.0.0.1:0", host: "127.0.0.1", layers: 32, requests: 8, pages: 64, chunk: 16,
		inFlight: 4, poolPages: 641, rounds: 3, seed: 1, timeout: 2 * time.Minute, nixlLog: "ERROR"}
	if err != nil || !reflect.DeepEqual(c, want) {
		t.Errorf("%+v, %v, want %+v", c, err, want)
	}
	t.Setenv("NIXL_LOG_LEVEL", "DEBUG")
	if c, err := parseFlags(nil); err != nil || c.nixlLog != "DEBUG" {
		t.Errorf("level %q, %v", c.nixlLog, err)
	}
}

func TestFlags(t *testing.T) {
	for args, check := range map[string]func(config) bool{
		"-engine native":                func(c config) bool { return c.kind == nixl.Native },
		"-requests 2 -in-flight 50":     func(c config) bool { return c.inFlight == 2 },
		"-requests 3 -pages 5":          func(c config) bool { return c.poolPages == 15+3+1 },
		"-requests 3 -pages 5 -pool 16": func(c config) bool { return c.poolPages == 16 },
		"-role prefill -bootstrap [::1]:7 -host ::1": func(c config) bool {
			return c.role == rolePrefill && c.bootstrap == "[::1]:7" && c.host == "::1"
		},
		"-role decode -bootstrap ten:1 -v -chunk 3": func(c config) bool {
			return c.bootstrap == "ten:1" && c.verbose && slices.Equal(c.shared, []string{"-chunk=3", "-v=true"})
		},
		"-requests 65535 -pages 12 -rounds 1":    func(c config) bool { return c.poolPages == 786420+196605+1 },
		"-timeout 1s -nixl-log TRACE -layers 1 ": func(c config) bool { return c.timeout == time.Second && c.nixlLog == "TRACE" && c.layers == 1 },
	} {
		if c, err := parseFlags(strings.Fields(args)); err != nil || !check(c) {
			t.Errorf("%s: %+v, %v", args, c, err)
		}
	}
}

func TestBadFlags(t *testing.T) {
	for args, want := range map[string]string{
		"-x":                                "flag provided but not defined: -x",
		"more":                              `unexpected argument "more"`,
		"-engine fast":                      `-engine: nixl: no engine "fast"`,
		"-role both -bootstrap 127.0.0.1:1": "-bootstrap goes with -role prefill and -role decode",
		"-role prefill":                     "-bootstrap goes with -role prefill and -role decode",
		"-role decode":                      "-bootstrap goes with -role prefill and -role decode",
		"-bootstrap 127.0.0.1:1":            "-bootstrap goes with -role prefill and -role decode",
		"-role router":                      `-role "router": want prefill, decode or both`,
		"-role decode -bootstrap 7000":      "-bootstrap: address 7000",
		"-host 0.0.0.0":                     `-host "0.0.0.0": want an IP address`,
		"-host here":                        `-host "here": want an IP address`,
		"-chunk 0":                          "-chunk: 0 pages at a time: want at least 1",
		"-pages 4097 -requests 1 -chunk 1":  "-chunk: 1 pages at a time: want at least 1, and at most 4096 chunks",
		"-requests 0":                       "-requests: 0 is not one of 1 to",
		"-requests -1":                      "-requests: -1 is not one of 1 to",
		"-requests 100000":                  "-requests: 100000 is not one of 1 to",
		"-requests 9223372036854775807":     "-requests: 9223372036854775807 is not one of 1 to",
		"-requests 92233720368547758070":    "invalid value",
		"-pages 0":                          "-pages: 0 is not one of 1 to",
		"-pages 9223372036854775807":        "-pages: 9223372036854775807 is not one of 1 to",
		"-layers 0":                         "-layers: 0 is not one of 1 to",
		"-rounds 0":                         "-rounds: 0 is not one of 1 to",
		"-rounds 1000 -requests 1000":       "-rounds: 1000 of 1000 requests are more than",
		"-in-flight 0":                      "-in-flight: 0 is not one of 1 to",
		"-in-flight 100000":                 "-in-flight: 100000 is not one of 1 to",
		"-pool -1":                          "-pool: -1 pages is not one of 1 to",
		"-pool 512":                         "-pool: 512 pages are too few for 8 requests of 64, and one for padding",
		"-pool 2000000":                     "-pool: 2000000 pages is not one of 1 to",
		"-pool 1048576 -layers 1024":        "-pool: 1048576 pages in 1024 layers are more descriptors than a list holds",
		"-seed -1":                          "invalid value",
		"-timeout 0":                        "-timeout 0s: want more than nothing",
		"-timeout -1s":                      "-timeout -1s: want more than nothing",
		"-timeout soon":                     "invalid value",
		"-nixl-log LOUD":                    `-nixl-log "LOUD": want one of TRACE, DEBUG`,
	} {
		_, err := parseFlags(strings.Fields(args))
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
		if errors.As(err, new(*helpError)) {
			t.Errorf("%s: help", args)
		}
	}
	var help *helpError
	if _, err := parseFlags([]string{"-h"}); !errors.As(err, &help) || !strings.Contains(help.text, "-in-flight") {
		t.Errorf("-h: %v", err)
	}
}
