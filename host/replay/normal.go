package replay

import (
	"encoding/binary"
	"math"
	"sync"
)

// normalValues are the 16-bit floats of a normal distribution, each as likely as the others: what it is at the middle of
// each of 65,536 parts of equal weight.
var normalValues = sync.OnceValue(func() *[1 << 16]uint16 {
	var t [1 << 16]uint16
	for i := range t {
		p := (float64(i) + 0.5) / float64(len(t))
		bits := math.Float32bits(float32(math.Sqrt2 * math.Erfinv(2*p-1)))
		t[i] = uint16((bits + 0x7fff + bits>>16&1) >> 16) // to the nearest, or the even one
	}
	return &t
})

// normalPages writes pages as engines have them: values of a normal distribution in bfloat16. They can be compressed.
type normalPages struct{ values *[1 << 16]uint16 }

// word is the page's 8 bytes, four values, from its counter.
func (n normalPages) word(c uint64) uint64 {
	w, t := mix(c), n.values
	return uint64(t[uint16(w)]) | uint64(t[uint16(w>>16)])<<16 | uint64(t[uint16(w>>32)])<<32 | uint64(t[uint16(w>>48)])<<48
}

func (n normalPages) fill(page []byte, seed uint64) {
	c := seed
	for ; len(page) >= 8; c += step {
		binary.LittleEndian.PutUint64(page, n.word(c))
		page = page[8:]
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], n.word(c))
	copy(page, last[:])
}

func (n normalPages) mismatches(page []byte, seed uint64) (wrong int64) {
	c := seed
	for ; len(page) >= 8; c += step {
		wrong += differing(binary.LittleEndian.Uint64(page) ^ n.word(c))
		page = page[8:]
	}
	var last, want [8]byte
	binary.LittleEndian.PutUint64(want[:], n.word(c))
	copy(last[copy(last[:], page):], want[len(page):])
	return wrong + differing(binary.LittleEndian.Uint64(last[:])^binary.LittleEndian.Uint64(want[:]))
}

// uniformPages writes pages that cannot be compressed, as fast as memory.
type uniformPages struct{}

func (uniformPages) fill(page []byte, seed uint64)             { fill(page, seed) }
func (uniformPages) mismatches(page []byte, seed uint64) int64 { return mismatches(page, seed) }
