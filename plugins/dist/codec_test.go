package dist

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// text is what compresses: half of it is in every other text, too.
func text(seed byte) []byte {
	shared := make([]byte, 64<<10)
	_, _ = rand.NewChaCha8([32]byte{}).Read(shared)
	own := make([]byte, 4<<10)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(own)
	return append(shared, own...)
}

func TestRoundTrip(t *testing.T) {
	base, module := text(1), text(2)
	packed := encode(t, base, nil)
	if hasBase(packed) {
		t.Error("the base is taken for a module that has one")
	}
	if got, err := Decode(packed, nil); err != nil || !bytes.Equal(got, base) {
		t.Errorf("the base comes back as %d bytes, %v", len(got), err)
	}
	packed = encode(t, module, base)
	if !hasBase(packed) {
		t.Error("a module with a base is taken for the base")
	}
	if len(packed) > len(module)/8 {
		t.Errorf("%d bytes of %d with a base that shares most of them", len(packed), len(module))
	}
	if got, err := Decode(packed, base); err != nil || !bytes.Equal(got, module) {
		t.Errorf("a module comes back as %d bytes, %v", len(got), err)
	}
	if again := encode(t, module, base); !bytes.Equal(again, packed) {
		t.Error("the same module is compressed to other bytes")
	}
}

// Another base, damage and what is not compressed at all are errors, never other bytes.
func TestRefused(t *testing.T) {
	base, module := text(1), text(2)
	packed := encode(t, module, base)
	damaged := bytes.Clone(packed)
	damaged[len(damaged)/2] ^= 1
	for what, c := range map[string]struct{ packed, base []byte }{
		"another base":  {packed, text(3)},
		"no base":       {packed, nil},
		"damage":        {damaged, base},
		"cut short":     {packed[:len(packed)-5], base},
		"a bare module": {[]byte("\x00asm\x01\x00\x00\x00"), nil},
		"nothing":       {nil, nil},
	} {
		if got, err := Decode(c.packed, c.base); !errors.Is(err, errModule) {
			t.Errorf("%s: %d bytes, %v", what, len(got), err)
		}
	}
}

func encode(t *testing.T, module, base []byte) []byte {
	t.Helper()
	packed, err := Encode(module, base)
	testenv.OK(t, err)
	return packed
}
