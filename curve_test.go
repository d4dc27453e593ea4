package nixlkv

import (
	"fmt"
	"strings"
	"testing"
)

func TestZ85(t *testing.T) {
	// The example of RFC 32.
	if got := z85([]byte{0x86, 0x4f, 0xd2, 0x6f, 0xb5, 0x59, 0xf7, 0x5b}); got != "HelloWorld" {
		t.Error(got)
	}
}

func TestNewCurve(t *testing.T) {
	a, err := NewCurve()
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewCurve()
	if err != nil || a.SecretKey == b.SecretKey || a.PublicKey == b.PublicKey || a.PublicKey == a.SecretKey {
		t.Fatalf("%v, %v, %v", a, b, err)
	}
	if len(a.PublicKey) != 40 || len(a.SecretKey) != 40 {
		t.Errorf("keys of %d and %d characters", len(a.PublicKey), len(a.SecretKey))
	}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, v := range []any{a, &a, struct{ C *Curve }{&a}, struct{ C Curve }{a}} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, a.SecretKey) {
				t.Errorf("%s of a %T tells the secret key", format, v)
			}
		}
	}
}
