package bootstrap

import "testing"

// A nil option, and an option of nil, are as if they were not there.
func TestNilOptions(t *testing.T) {
	s, err := Listen("127.0.0.1:0", nil, WithLogger(nil), WithClock(nil), WithTLS(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	c, err := NewClient(s.Endpoint().String(), nil, WithTransport(nil), WithClientTLS(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
}
