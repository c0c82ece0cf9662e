package server

import (
	"math/bits"
	"sync"

	"github.com/kvhost/kvhost/host/internal/transfer"
)

// checkBlocks checks one chunk's block ids against the registration.
func (r *registration) checkBlocks(i int, blocks []uint32, holes bool) error {
	if err := transfer.CheckBlocks(r.memory, blocks, holes); err != nil {
		return invalid(at("chunks", i, "blocks"), "%v", err)
	}
	return nil
}

// blockSet finds block ids that a job names twice. It is sized by the ids of the job, not by the number of blocks that the
// client claims to have.
type blockSet struct {
	slots []uint64 // hash table with open addressing; an element is a job's stamp and a block id
	stamp uint32
}

// blockSets is the pool of sets for all sessions. A set is in use only while one message is checked.
var blockSets = sync.Pool{New: func() any { return new(blockSet) }}

// Begin empties the set and makes room for the given number of ids. Instead of clearing the table it takes a new stamp.
func (u *blockSet) Begin(ids int) {
	size := 1 << bits.Len(uint(2*ids))
	if u.stamp++; len(u.slots) < size || u.stamp == 0 {
		u.slots, u.stamp = make([]uint64, size), 1
	}
}

// Add adds an id and reports whether it is new to the job. Begin must have made room for it.
func (u *blockSet) Add(b uint32) bool {
	want := uint64(u.stamp)<<32 | uint64(b)
	mask := uint64(len(u.slots) - 1)
	for i := uint64(b) * 0x9e3779b97f4a7c15 >> 32 & mask; ; i = (i + 1) & mask {
		switch have := u.slots[i]; {
		case have == want:
			return false
		case have>>32 != uint64(u.stamp):
			u.slots[i] = want
			return true
		}
	}
}
