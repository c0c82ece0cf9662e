package replay

import (
	"encoding/binary"
	"math/bits"

	"github.com/kvhost/kvhost/host/chunk"
)

// The multipliers are those of SplitMix64.
const (
	step = 0x9e3779b97f4a7c15
	mixA = 0xbf58476d1ce4e5b9
	mixB = 0x94d049bb133111eb

	step2 = 2 * step & (1<<64 - 1)
	step3 = 3 * step & (1<<64 - 1)
	step4 = 4 * step & (1<<64 - 1)
)

// mix spreads every bit of x over the word.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * mixA
	x = (x ^ x>>27) * mixB
	return x ^ x>>31
}

// pageSeed identifies a page; its content follows from it alone.
func pageSeed(key *chunk.Key, rank uint32, plane chunk.Plane, block uint32) uint64 {
	s := mix(binary.LittleEndian.Uint64(key[0:]) + step)
	s = mix(s ^ binary.LittleEndian.Uint64(key[8:]))
	s = mix(s ^ (uint64(rank)<<32 | uint64(block)) + step)
	return mix(s ^ (uint64(plane.Layer)<<32 | uint64(plane.Part)) + step2)
}

// word is the page's 8 bytes at offset 8i, from its counter c = seed + i*step. One multiplication is enough: no two
// words of a page are equal, hardly any two of different pages are, and it is as fast as memory.
func word(c uint64) uint64 { return (c ^ c>>32) * mixA }

// fill writes a page.
func fill(page []byte, seed uint64) {
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

// mismatches counts the bytes of a page that differ from what fill wrote.
func mismatches(page []byte, seed uint64) int64 {
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

// differing counts the bytes of x that are not zero.
func differing(x uint64) int64 {
	const low7 = 0x7f7f7f7f7f7f7f7f
	return int64(bits.OnesCount64((x&low7 + low7 | x) &^ low7))
}

// poison fills a destination page before a load. No page has this content.
var poison = func() []byte {
	b := make([]byte, 64<<10)
	for i := range b {
		b[i] = "\xde\xad\x5e\xed"[i%4]
	}
	return b
}()

func poisonPage(page []byte) {
	for len(page) > 0 {
		page = page[copy(page, poison):]
	}
}
