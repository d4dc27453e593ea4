package ratelog

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestWarnBounds(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	l := New(zap.New(core))
	const n = 10_000
	for range n {
		l.Warn("again")
	}
	if got := uint64(logs.Len()) + l.Suppressed(); got != n {
		t.Errorf("%d lines logged and %d suppressed, of %d", logs.Len(), l.Suppressed(), n)
	}
	if logs.Len() == 0 || logs.Len() > n/2 {
		t.Errorf("%d lines logged, of %d at once", logs.Len(), n)
	}
}
