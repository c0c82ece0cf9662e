package kv

import (
	"encoding/hex"
	"fmt"
)

// KeyBytes is the room for a key. Engines' hashes are 16 to 32 bytes; shorter ones are padded with zeros.
const KeyBytes = 32

// Key names a chunk within a namespace and group: the hash of the whole token prefix up to the chunk's end. Because the
// hash is chained, a key has exactly one parent.
type Key [KeyBytes]byte

// Root is the parent of a prefix's first chunk.
var Root Key

// ParseKey takes an engine's hash of 8 to 32 bytes. The all-zero key is refused: it means "no parent".
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

// String is the key in hexadecimal, all 32 bytes.
func (k Key) String() string { return hex.EncodeToString(k[:]) }
