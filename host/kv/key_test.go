package kv

import (
	"bytes"
	"errors"
	"testing"
)

func TestParseKey(t *testing.T) {
	for _, c := range []struct {
		name string
		in   []byte
		ok   bool
	}{
		{"sha256", bytes.Repeat([]byte{7}, 32), true},
		{"xxh3-128", bytes.Repeat([]byte{7}, 16), true},
		{"shortest", bytes.Repeat([]byte{7}, 8), true},
		{"empty", nil, false},
		{"too short", bytes.Repeat([]byte{7}, 7), false},
		{"too long", bytes.Repeat([]byte{7}, 33), false},
		{"all zero means no parent", make([]byte, 32), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := ParseKey(c.in)
			if c.ok != (err == nil) {
				t.Fatalf("ParseKey(%x): %v", c.in, err)
			}
			if err != nil && !errors.Is(err, ErrKey) {
				t.Errorf("%v is not ErrKey", err)
			}
			if c.ok && !bytes.Equal(k[:len(c.in)], c.in) {
				t.Errorf("key %s does not start with %x", k, c.in)
			}
		})
	}
}
