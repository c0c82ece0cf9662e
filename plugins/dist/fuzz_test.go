package dist

import (
	"bytes"
	"testing"
)

// FuzzDecode decompresses what is no module, within bounds of memory.
func FuzzDecode(f *testing.F) {
	base := bytes.Repeat([]byte("base of the others "), 400)
	packed, err := Encode(append([]byte("module "), base...), base)
	if err != nil {
		f.Fatal(err)
	}
	alone, err := Encode(base, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed)
	f.Add(alone)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, base := range [][]byte{nil, base} {
			if m, err := Decode(b, base); err == nil && (len(m) == 0 || len(m) > maxModule) {
				t.Fatalf("a module of %d bytes", len(m))
			}
		}
	})
}
