package server

import (
	"math/bits"
	"sync"

	"github.com/kvhost/kvhost/abi"
)

// checkBlocks checks one chunk's block ids against the registration.
func (r *registration) checkBlocks(i int, blocks []uint32, holes bool) error {
	if want := r.memory.ChunkBlocks(); len(blocks) != want {
		return invalid(at("chunks", i, "blocks"), "%d block ids, a chunk of group %d has %d blocks", len(blocks), r.group.ID, want)
	}
	for _, b := range blocks {
		if b >= r.memory.Blocks() && (b != abi.None || !holes) {
			return invalid(at("chunks", i, "blocks"), "block id %d, %d blocks are registered", b, r.memory.Blocks())
		}
	}
	return nil
}

// blockSet finds block ids that one job names twice. Its memory grows with the ids of a job, not with the blocks that
// a client says it has.
type blockSet struct {
	slots []uint64 // open addressing: the stamp of a job, and an id that it names
	stamp uint32
}

// blockSets are shared by all sessions: a set is used only while one message is checked.
var blockSets = sync.Pool{New: func() any { return new(blockSet) }}

// Begin empties the set for a job with so many ids. It is not cleared but stamped anew.
func (u *blockSet) Begin(ids int) {
	size := 1 << bits.Len(uint(2*ids))
	if u.stamp++; len(u.slots) < size || u.stamp == 0 {
		u.slots, u.stamp = make([]uint64, size), 1
	}
}

// Add reports whether the job had not named the id yet. Begin has made room for all its ids.
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
