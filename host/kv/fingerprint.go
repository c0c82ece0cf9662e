package kv

import (
	"encoding/binary"
	"math/bits"
)

// Fingerprint returns the 64-bit name of a chunk for policies: xxh3-64 of namespace digest, group and key. It is 0 only for
// Root.
func Fingerprint(ns Digest, group uint32, k Key) uint64 {
	p := PrinterOf(ns, group)
	return p.Print(&k)
}

// Printer computes the fingerprints of a group's keys. It computes the common part once. The hashed bytes always have the same
// length, so only one case of XXH3 is implemented ("medium inputs", 17 to 128 bytes):
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. The bytes are not copied together in memory, because that
// would take longer than hashing them.
type Printer struct {
	common uint64 // the part that follows from the digest and the length
	group  uint64
}

const printed = 16 + 4 + KeyBytes

// Words of XXH3's default secret, by their offset, and its first prime.
const (
	secret00 = 0xbe4ba423396cfeb8
	secret08 = 0x1cad21f72c81017c
	secret16 = 0xdb979083e96dd4de
	secret24 = 0x1f67b3b7a4a44072
	secret32 = 0x78e5c0cc4ee679cb
	secret40 = 0x2172ffcc7dd05a82
	secret48 = 0x8e2443f7744608b8
	secret56 = 0x4c263a81e69035e0
	prime    = 0x9e3779b185ebca87
	mixer    = 0x165667919e3779f9
)

// PrinterOf returns the printer for a group of a namespace.
func PrinterOf(ns Digest, group uint32) Printer {
	le, length := binary.LittleEndian, uint64(printed)
	return Printer{length*prime + fold(le.Uint64(ns[:])^secret00, le.Uint64(ns[8:])^secret08), uint64(group)}
}

// Print returns the fingerprint of a key.
func (p *Printer) Print(k *Key) uint64 {
	le := binary.LittleEndian
	a, b, c, d := le.Uint64(k[:]), le.Uint64(k[8:]), le.Uint64(k[16:]), le.Uint64(k[24:])
	if a|b|c|d == 0 {
		return 0
	}
	h := p.common
	h += fold((p.group|a<<32)^secret32, (a>>32|b<<32)^secret40)
	h += fold(a^secret48, b^secret56)
	h += fold(c^secret16, d^secret24)
	h ^= h >> 37
	h *= mixer
	h ^= h >> 32
	return max(h, 1)
}

// fold returns the two halves of a product, combined by XOR.
func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}
