package abi

import (
	"bytes"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

func TestCustomSection(t *testing.T) {
	typeSection := []byte{1, 1, 0}
	module := slices.Concat(wasmHeader, []byte{0, 3, 1, 'x', '1'}, typeSection, []byte{0, 3, 1, 'y', '2'}, []byte{0, 3, 1, 'x', '3'})
	if got, ok, err := CustomSection(module, "x"); string(got) != "1" || !ok || err != nil {
		t.Errorf("x: %q, %v, %v", got, ok, err)
	}
	if _, ok, err := CustomSection(module, "z"); ok || err != nil {
		t.Errorf("z: %v, %v", ok, err)
	}
	out, err := WithCustomSection(module, "x", []byte("new"))
	testenv.OK(t, err)
	if want := slices.Concat(wasmHeader, typeSection, []byte{0, 3, 1, 'y', '2'}, []byte{0, 5, 1, 'x', 'n', 'e', 'w'}); !bytes.Equal(out, want) {
		t.Errorf("the module with the section replaced is %q, want %q", out, want)
	}
	again, err := WithCustomSection(out, "x", []byte("new"))
	if err != nil || !bytes.Equal(again, out) {
		t.Errorf("packing twice differs: %q, %v", again, err)
	}
}

func FuzzCustomSection(f *testing.F) {
	for _, s := range []string{"", "\x00asm", "\x00asm\x02\x00\x00\x00", string(wasmHeader) + "\x00", string(wasmHeader) + "\x00\x02\x05x", string(wasmHeader) + "\x00\x03\x01xd"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, module []byte) {
		out, err := WithCustomSection(module, ManifestSection, []byte("data"))
		if err != nil {
			return
		}
		if got, ok, err := CustomSection(out, ManifestSection); string(got) != "data" || !ok || err != nil {
			t.Errorf("reading back the section of %q: got %q, %v, %v", out, got, ok, err)
		}
	})
}
