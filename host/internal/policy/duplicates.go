package policy

import "github.com/kvhost/kvhost/host/internal/policy/sandbox"

// duplicates finds a number that occurs twice among at most MaxVictims, without allocating or sorting. It is a small
// hash set; each entry carries the generation that wrote it, so that it need not be cleared.
type duplicates struct {
	gen   uint32
	table [4 * sandbox.MaxVictims]struct{ gen, slot uint32 }
}

func (d *duplicates) find(slots []uint32) (uint32, bool) {
	if len(slots) < 2 {
		return 0, false
	}
	d.gen++
	if d.gen == 0 { // wrapped: entries of earlier generations must not look current
		clear(d.table[:])
		d.gen = 1
	}
	const mask = uint32(len(d.table) - 1)
	for _, s := range slots {
		at := (s * 0x9e3779b1) >> 16 & mask
		for d.table[at].gen == d.gen {
			if d.table[at].slot == s {
				return s, true
			}
			at = (at + 1) & mask
		}
		d.table[at].gen, d.table[at].slot = d.gen, s
	}
	return 0, false
}
