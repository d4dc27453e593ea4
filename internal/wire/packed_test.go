package wire

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestPacked(t *testing.T) {
	if got := pack([]byte{9}, []uint64{1 << 63, 0x0102030405060708}); !bytes.Equal(got, []byte{9, 0, 0, 0, 0, 0, 0, 0, 0x80, 8, 7, 6, 5, 4, 3, 2, 1}) {
		t.Errorf("%x", got)
	}
	if got := pack(nil, []int32{-2, 0x01020304}); !bytes.Equal(got, []byte{0xfe, 0xff, 0xff, 0xff, 4, 3, 2, 1}) {
		t.Errorf("%x", got)
	}
	if got, err := unpack[int32]([]byte{0xfe, 0xff, 0xff, 0xff, 4, 3, 2, 1}, 2); err != nil || !reflect.DeepEqual(got, []int32{-2, 0x01020304}) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := unpack[uint32](nil, 0); got != nil || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := unpack[uint32](make([]byte, 12), 2); !isAll(err, nixlkv.ErrLimit) {
		t.Error(err)
	}
}

func TestPackedLists(t *testing.T) {
	for _, c := range []struct {
		name  string
		lists [][]uint32
		bytes []byte
	}{
		{"none", nil, nil},
		{"one empty", [][]uint32{nil}, []byte{1, 0, 0, 0, 0, 0, 0, 0}},
		{"two", [][]uint32{{1, 2}, nil, {3}}, []byte{3, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0}},
	} {
		if got := packLists(nil, c.lists); !bytes.Equal(got, c.bytes) {
			t.Errorf("%s: packed %x, want %x", c.name, got, c.bytes)
		}
		got, err := unpackLists[uint32](c.bytes, 3, 2)
		if err != nil || !reflect.DeepEqual(got, c.lists) {
			t.Errorf("%s: unpacked %v, %v", c.name, got, err)
		}
		for n := 1; n < len(c.bytes); n++ {
			if got, err := unpackLists[uint32](c.bytes[:n], 3, 2); err == nil {
				t.Errorf("%s: the first %d bytes give %v", c.name, n, got)
			}
		}
	}
	// A count of zero is what no sender writes, and means what nothing means.
	if got, err := unpackLists[uint32]([]byte{0, 0, 0, 0}, 3, 2); got != nil || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	// The lists share memory; appending to one must not reach the next.
	got, err := unpackLists[uint32](packLists(nil, [][]uint32{{1}, {2}}), 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	_ = append(got[0], 9)
	if got[1][0] != 2 {
		t.Errorf("%v", got)
	}
}

func TestDecimal(t *testing.T) {
	for _, c := range []struct {
		text  string
		limit uint64
		want  uint64
		fault decimalFault
	}{
		{"0", 0, 0, decimalOK}, {"7", 7, 7, decimalOK}, {"8", 7, 0, decimalRange},
		{"18446744073709551615", 1<<64 - 1, 1<<64 - 1, decimalOK},
		{"18446744073709551616", 1<<64 - 1, 0, decimalRange},
		{"99999999999999999999999999", 1<<64 - 1, 0, decimalRange},
		{"", 9, 0, decimalForm}, {"00", 9, 0, decimalForm}, {"01", 9, 0, decimalForm}, {"-0", 9, 0, decimalForm},
		{"1_0", 99, 0, decimalForm}, {" 1", 9, 0, decimalForm}, {"1 ", 9, 0, decimalForm}, {"1\n", 9, 0, decimalForm},
		{"٣", 9, 0, decimalForm}, {"0x1", 9, 0, decimalForm}, {"99999999999999999999x", 9, 0, decimalForm},
	} {
		if got, fault := parseDecimal([]byte(c.text), c.limit); got != c.want || fault != c.fault {
			t.Errorf("%q: %d, %d, want %d, %d", c.text, got, fault, c.want, c.fault)
		}
	}
}
