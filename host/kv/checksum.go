package kv

import (
	"fmt"

	"github.com/zeebo/xxh3"
)

// Algorithm is the algorithm of an extent's checksum. The only one is fast on a processor, and GPU kernels can compute it too.
type Algorithm uint8

// XXH3 is xxh3-64 with seed 0 over the extent's bytes.
const XXH3 Algorithm = 1

// Sum returns the checksum of one extent.
func Sum(extent []byte) uint64 { return xxh3.Hash(extent) }

// SumExtents writes the checksums of extents [lo, hi) of p to table[lo:hi]. data holds the payload from offset base on.
func SumExtents(p *Plan, lo, hi int, data []byte, base int64, table []uint64) {
	for i := lo; i < hi; i++ {
		e := p.extents[i]
		table[i] = Sum(data[e.Off-base : e.Off-base+int64(e.Len)])
	}
}

// VerifyExtents checks extents [lo, hi) of p against table. The error names the first extent that differs.
func VerifyExtents(p *Plan, lo, hi int, data []byte, base int64, table []uint64) error {
	for i := lo; i < hi; i++ {
		e := p.extents[i]
		if got := Sum(data[e.Off-base : e.Off-base+int64(e.Len)]); got != table[i] {
			return fmt.Errorf("%w: extent %d at payload byte %d: %016x, the table says %016x", ErrChecksum, i, e.Off, got, table[i])
		}
	}
	return nil
}
