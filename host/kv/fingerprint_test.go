package kv

import (
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

func TestRootHasNoFingerprint(t *testing.T) {
	if got := Fingerprint(Digest{3}, 0, Root); got != 0 {
		t.Errorf("the fingerprint of Root is %016x, want 0", got)
	}
}
