package llmd

import (
	"math"
	"strconv"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestUint(t *testing.T) {
	for _, v := range []uint32{0, 1, 9, 10, 99, 4096, math.MaxUint32} {
		if got, want := string(appendUint([]byte("x"), v)), "x"+strconv.FormatUint(uint64(v), 10); got != want {
			t.Errorf("%d was spelled %s, want %s", v, got, want)
		}
	}
}

func TestKey(t *testing.T) {
	q := &abi.PlaceQuery{KeyLen: 4, Key: [abi.KeyBytes]byte{0xab, 0, 1, 0xff}}
	text := appendKey(nil, q)
	if string(text) != "ab0001ff" {
		t.Fatalf("spelled %s", text)
	}
	if got := appendKey(nil, &abi.PlaceQuery{KeyLen: abi.KeyBytes + 1}); len(got) != 0 {
		t.Errorf("a key that is too long was spelled %s", got)
	}
}
