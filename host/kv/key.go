package kv

import (
	"encoding/hex"
	"fmt"
)

// KeyBytes is the size of a key in memory. Engines' hashes have 16 to 32 bytes, and shorter ones are padded with zeros.
const KeyBytes = 32

// Key names a chunk within a namespace and a group: the hash of the whole token prefix up to the chunk's end. The hash
// is chained, so a key has exactly one parent.
type Key [KeyBytes]byte

// Root is the parent of a prefix's first chunk.
var Root Key

// ParseKey converts an engine's hash of 8 to 32 bytes. It refuses the all-zero key, which means "no parent".
func ParseKey(b []byte) (Key, error) {
	var k Key
	if len(b) < 8 || len(b) > KeyBytes {
		return k, fmt.Errorf("%w: %d bytes, want 8 to %d", ErrKey, len(b), KeyBytes)
	}
	copy(k[:], b)
	if k == Root {
		return k, fmt.Errorf("%w: all zero", ErrKey)
	}
	return k, nil
}

// String returns all 32 bytes of the key in hexadecimal.
func (k Key) String() string { return hex.EncodeToString(k[:]) }
