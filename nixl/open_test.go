package nixl

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestAutoFallsBackAndSaysWhy(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "libnixl_capi.so")
	core, logs := observer.New(zap.InfoLevel)
	e, err := Open(Auto, WithLibrary(missing), WithLogger(zap.New(core)))
	check(t, err)
	defer e.Close()
	info := e.Info()
	if info.Kind != Embedded || !strings.Contains(info.Why, missing) {
		t.Errorf("got %+v", info)
	}
	if l := logs.FilterMessage("engine opened").All(); len(l) != 1 || !strings.Contains(l[0].ContextMap()["why"].(string), missing) {
		t.Errorf("log %v", l)
	}
	_, err = Open(Native, WithLibrary(missing))
	if !errors.Is(err, ErrLibraryNotFound) || !strings.Contains(err.Error(), missing) {
		t.Errorf("native: %v", err)
	}
	_, err = Open(Kind(9))
	wantErr(t, "unknown engine", err, ErrUnsupported)
}

func TestAutoTakesNative(t *testing.T) {
	needNative(t)
	e, err := Open(Auto)
	check(t, err)
	defer e.Close()
	i := e.Info()
	if i.Kind != Native || i.Path == "" || i.Calls == "" || i.Version == "" || !strings.Contains(i.Why, i.Path) {
		t.Errorf("got %+v", i)
	}
}

func TestCallsChoice(t *testing.T) {
	needNative(t)
	_, err := Open(Native, WithCalls("carrier pigeon"))
	wantErr(t, "unknown calls", err, ErrUnsupported)
	_, err = Open(Native, WithCalls("cgo"))
	if haveCgo {
		check(t, err)
	} else {
		wantErr(t, "cgo in a build without it", err, ErrUnsupported)
	}
}

func TestKindText(t *testing.T) {
	for _, k := range []Kind{Auto, Native, Embedded} {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("%v: %v, %v", k, got, err)
		}
	}
	if _, err := ParseKind("NIXL"); err == nil || Kind(-1).String() != "Kind(-1)" {
		t.Error("an unknown engine passed")
	}
}

func TestStatusText(t *testing.T) {
	for s, want := range map[Status]string{
		Success: "NIXL_CAPI_SUCCESS (0)", InProgress: "NIXL_CAPI_IN_PROG (1)", StatusInvalidParam: "NIXL_CAPI_ERROR_INVALID_PARAM (-1)",
		StatusBackend: "NIXL_CAPI_ERROR_BACKEND (-2)", StatusInvalidState: "NIXL_CAPI_ERROR_INVALID_STATE (-3)",
		StatusException: "NIXL_CAPI_ERROR_EXCEPTION (-4)", StatusNoTelemetry: "NIXL_CAPI_ERROR_NO_TELEMETRY (-5)",
		StatusNotFound: "NIXL_CAPI_ERROR_NOT_FOUND (-6)", -77: "unknown NIXL status (-77)",
	} {
		if s.Error() != want {
			t.Errorf("%d: %q", int(s), s.Error())
		}
	}
	err := error(&Error{Call: "post", Agent: "a", Peer: "b", Err: StatusBackend})
	if err.Error() != "nixl: post: agent a: peer b: NIXL_CAPI_ERROR_BACKEND (-2)" || !errors.Is(err, StatusBackend) {
		t.Errorf("got %v", err)
	}
}
