package kv

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"
)

// TestFingerprintIsXXH3 compares with a whole implementation: policies, checkpoints and lists of touches outlive this one.
func TestFingerprintIsXXH3(t *testing.T) {
	random := rand.NewChaCha8([32]byte{1})
	for range 1000 {
		var ns Digest
		var k Key
		_, _ = random.Read(ns[:])
		_, _ = random.Read(k[:8+random.Uint64()%25])
		group := uint32(random.Uint64())
		b := binary.LittleEndian.AppendUint32(ns[:], group)
		if got, want := Fingerprint(ns, group, k), xxh3.Hash(append(b, k[:]...)); got != want {
			t.Fatalf("%x, group %d, %s: %016x, want %016x", ns, group, k, got, want)
		}
	}
}

func TestFingerprintSeparatesNamespacesAndGroups(t *testing.T) {
	k, _ := ParseKey(bytes.Repeat([]byte{1}, 32))
	seen := map[uint64]string{}
	for _, ns := range []Digest{{}, {1}, {15: 1}} {
		for group := range uint32(3) {
			f := Fingerprint(ns, group, k)
			where := ns.String()
			if f == 0 {
				t.Errorf("fingerprint 0 is kept for Root")
			}
			if other, ok := seen[f]; ok {
				t.Errorf("%s group %d and %s share a fingerprint", where, group, other)
			}
			seen[f] = where
		}
	}
	if Fingerprint(Digest{3}, 0, Root) != 0 {
		t.Error("Root has a fingerprint")
	}
}
