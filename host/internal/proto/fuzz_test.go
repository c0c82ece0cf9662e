package proto

import (
	"bytes"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// FuzzDescriptor reads what comes with a descriptor, and writes it again.
func FuzzDescriptor(f *testing.F) {
	f.Add(AppendDescriptor(nil, bytes.Repeat([]byte{7}, NonceBytes), 1<<60))
	f.Fuzz(func(t *testing.T, b []byte) {
		nonce, tag, err := ParseDescriptor(b)
		if (err == nil) != (len(b) == DescriptorBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err == nil && !bytes.Equal(AppendDescriptor(nil, nonce[:], tag), b) {
			t.Fatalf("%x reads back as another", b)
		}
	})
}

// FuzzKeys unpacks keys of every length, and packs them again.
func FuzzKeys(f *testing.F) {
	f.Add([]byte("0123456789abcdef0123456789abcdef"), 16)
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00"), 8)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n < 8 || n > kv.KeyBytes { // HELLO has refused it
			return
		}
		keys, err := ParseKeys(nil, b, n)
		if err == nil && !bytes.Equal(PackKeys(keys, n), b) {
			t.Fatalf("%d keys read back as others", len(keys))
		}
		for _, k := range keys {
			if err == nil && k == kv.Root {
				t.Fatal("the key that is none")
			}
		}
		if one, oneErr := ParseKey(b, n); len(b) == n && (oneErr == nil) != (err == nil) || oneErr == nil && !bytes.Equal(one[:n], b) {
			t.Fatalf("one key: %v, a list of one: %v", oneErr, err)
		}
	})
}
