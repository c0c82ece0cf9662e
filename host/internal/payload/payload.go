package payload

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/kvhost/kvhost/host/kv"
)

// Types of values in pages.
const (
	U8       = "u8" // uniformly distributed bytes, which cannot be compressed
	BFloat16 = "bfloat16"
	FP8      = "fp8" // e4m3
)

// Content fills pages with values of one type.
type Content interface {
	Fill(page []byte, seed uint64)
	// Mismatches counts the bytes that differ from those that Fill writes.
	Mismatches(page []byte, seed uint64) int64
}

// Of returns the content of a type. For BFloat16 and FP8 it has values of a normal distribution.
func Of(dtype string) (Content, error) {
	switch dtype {
	case U8:
		return uniform{}, nil
	case BFloat16:
		return bfloat16Words(), nil
	case FP8:
		return float8Words(), nil
	}
	return nil, fmt.Errorf("%w: %q, want %s, %s or %s", ErrDType, dtype, U8, BFloat16, FP8)
}

// Multipliers of SplitMix64.
const (
	step = 0x9e3779b97f4a7c15
	mixA = 0xbf58476d1ce4e5b9
	mixB = 0x94d049bb133111eb

	step2 = 2 * step & (1<<64 - 1)
	step3 = 3 * step & (1<<64 - 1)
	step4 = 4 * step & (1<<64 - 1)
)

// mix makes every bit of the result depend on every bit of x.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * mixA
	x = (x ^ x>>27) * mixB
	return x ^ x>>31
}

// Seed identifies a page of a chunk.
func Seed(key *kv.Key, rank uint32, plane kv.Plane, block uint32) uint64 {
	s := mix(binary.LittleEndian.Uint64(key[0:]) + step)
	s = mix(s ^ binary.LittleEndian.Uint64(key[8:]))
	s = mix(s ^ (uint64(rank)<<32 | uint64(block)) + step)
	return mix(s ^ (uint64(plane.Layer)<<32 | uint64(plane.Part)) + step2)
}

// word returns the 8 bytes of a page at offset 8i, given their counter c = seed + i*step. One multiplication is enough,
// and is as fast as memory: no two words of a page are equal, and hardly any two words of different pages are.
func word(c uint64) uint64 { return (c ^ c>>32) * mixA }

// uniform is the content of U8.
type uniform struct{}

func (uniform) Fill(page []byte, seed uint64) {
	c := seed
	for len(page) >= 32 {
		p := page[:32]
		binary.LittleEndian.PutUint64(p[0:], word(c))
		binary.LittleEndian.PutUint64(p[8:], word(c+step))
		binary.LittleEndian.PutUint64(p[16:], word(c+step2))
		binary.LittleEndian.PutUint64(p[24:], word(c+step3))
		c += step4
		page = page[32:]
	}
	for ; len(page) > 0; c += step {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], word(c))
		page = page[copy(page, last[:]):]
	}
}

func (uniform) Mismatches(page []byte, seed uint64) int64 {
	c := seed
	var wrong int64
	for len(page) >= 32 {
		p := page[:32]
		a := binary.LittleEndian.Uint64(p[0:]) ^ word(c)
		b := binary.LittleEndian.Uint64(p[8:]) ^ word(c+step)
		d := binary.LittleEndian.Uint64(p[16:]) ^ word(c+step2)
		e := binary.LittleEndian.Uint64(p[24:]) ^ word(c+step3)
		if a|b|d|e != 0 {
			wrong += differing(a) + differing(b) + differing(d) + differing(e)
		}
		c += step4
		page = page[32:]
	}
	for ; len(page) > 0; c += step {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], word(c))
		n := min(len(page), len(last))
		for i := range n {
			if page[i] != last[i] {
				wrong++
			}
		}
		page = page[n:]
	}
	return wrong
}

// words is a content that consists of words of 8 bytes, each computed from its counter.
type words func(c uint64) uint64

func (w words) Fill(page []byte, seed uint64) {
	c := seed
	for ; len(page) >= 8; c += step {
		binary.LittleEndian.PutUint64(page, w(c))
		page = page[8:]
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], w(c))
	copy(page, last[:])
}

func (w words) Mismatches(page []byte, seed uint64) (wrong int64) {
	c := seed
	for ; len(page) >= 8; c += step {
		wrong += differing(binary.LittleEndian.Uint64(page) ^ w(c))
		page = page[8:]
	}
	var last, want [8]byte
	binary.LittleEndian.PutUint64(want[:], w(c))
	copy(last[copy(last[:], page):], want[len(page):])
	return wrong + differing(binary.LittleEndian.Uint64(last[:])^binary.LittleEndian.Uint64(want[:]))
}

// differing counts the bytes of x that are not zero.
func differing(x uint64) int64 {
	const low7 = 0x7f7f7f7f7f7f7f7f
	return int64(bits.OnesCount64((x&low7 + low7 | x) &^ low7))
}
