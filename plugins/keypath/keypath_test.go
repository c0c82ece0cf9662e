package keypath

import (
	"math"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestUint(t *testing.T) {
	for _, v := range []uint32{0, 1, 9, 10, 99, 4096, math.MaxUint32} {
		if got, ok := ParseUint(AppendUint(nil, v)); !ok || got != v {
			t.Errorf("%d came back as %d, %v", v, got, ok)
		}
	}
	for _, s := range []string{"", "00", "01", "-1", "+1", "1a", "4294967296", "99999999999", " 1"} {
		if v, ok := ParseUint([]byte(s)); ok {
			t.Errorf("%q was read as %d", s, v)
		}
	}
}

func TestKey(t *testing.T) {
	q := &abi.PlaceQuery{KeyLen: 4, Key: [abi.KeyBytes]byte{0xab, 0, 1, 0xff}}
	text := AppendKey(nil, q)
	if string(text) != "ab0001ff" {
		t.Fatalf("spelled %s", text)
	}
	var id abi.PathIdentity
	if !ParseKey(&id, text) || id.KeyLen != 4 || id.Key != q.Key {
		t.Errorf("came back as %+v", id)
	}
	for _, s := range []string{"", "a", "AB", "ag", "ab ", string(make([]byte, 66))} {
		if ParseKey(&id, []byte(s)) {
			t.Errorf("%q was read as a key", s)
		}
	}
	if got := AppendKey(nil, &abi.PlaceQuery{KeyLen: abi.KeyBytes + 1}); len(got) != 0 {
		t.Errorf("a key that is too long was spelled %s", got)
	}
}
