package hostmem

import "testing"

func TestNilOption(t *testing.T) {
	b, err := Alloc(1, nil, Name("named"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Free(); err != nil {
		t.Error(err)
	}
}
