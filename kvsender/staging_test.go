package kvsender

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

func TestStagingIsRefusedWithItsReason(t *testing.T) {
	mem := newKitMemory(t, 2)
	defer mem.free(t)
	for want, change := range map[string]func(l *registry.Layout){
		"this library has none": func(*registry.Layout) {},
		"PP 2":                  func(l *registry.Layout) { l.Ranks.PP = 2 },
		"MLA":                   func(l *registry.Layout) { l.MLA = true },
		"CP 4":                  func(l *registry.Layout) { l.Ranks.CP = 4 },
		"page size 7":           func(l *registry.Layout) { l.PageSize = 7 },
	} {
		l := mem.layout()
		change(l)
		_, err := NewManager(t.Context(), l, WithStagingBuffer(32))
		if !errors.As(err, new(*StagingError)) || !errors.Is(err, nixlkv.ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
