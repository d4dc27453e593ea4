//go:build !linux || !cgo

package control

import (
	"context"
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestUnsupported(t *testing.T) {
	if _, err := New(Config{Handler: func([][]byte) {}}); !errors.Is(err, nixlkv.ErrUnsupported) {
		t.Fatal(err)
	}
	if _, err := New(Config{}); !errors.Is(err, ErrConfig) {
		t.Fatal(err)
	}
	var c *Control
	if _, err := c.Send(context.Background(), Message{}); !errors.Is(err, nixlkv.ErrUnsupported) {
		t.Fatal(err)
	}
	if err := c.SendAsync(Message{}, func(uint64, error) {}); !errors.Is(err, nixlkv.ErrUnsupported) {
		t.Fatal(err)
	}
}
