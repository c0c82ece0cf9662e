package server

import "github.com/kvhost/kvhost/abi"

// checkBlocks checks one chunk's block ids against the registration.
func (r *registration) checkBlocks(i int, blocks []uint32, holes bool) error {
	if len(blocks) != int(r.group.Geometry.Blocks) {
		return invalid(at("chunks", i, "blocks"), "%d block ids, a chunk of group %d has %d blocks", len(blocks),
			r.group.ID, r.group.Geometry.Blocks)
	}
	for _, b := range blocks {
		if b >= r.memory.Blocks() && (b != abi.None || !holes) {
			return invalid(at("chunks", i, "blocks"), "block id %d, %d blocks are registered", b, r.memory.Blocks())
		}
	}
	return nil
}

// usedBlocks detects block ids that one job names twice. It stamps an array that is never cleared. For huge
// registrations, which would let a client make that array expensive, it uses a map.
type usedBlocks struct {
	stamps []uint32
	stamp  uint32
	seen   map[uint32]struct{}
}

// maxStamps bounds the array to 16 MiB.
const maxStamps = 1 << 22

// newUse starts a job. The caller holds the turn, so one job is checked at a time.
func (r *registration) newUse() *usedBlocks {
	u := &r.used
	if r.memory.Blocks() > maxStamps {
		u.seen = map[uint32]struct{}{}
		return u
	}
	if u.stamp++; u.stamps == nil || u.stamp == 0 {
		u.stamps, u.stamp = make([]uint32, r.memory.Blocks()), 1
	}
	return u
}

// add reports whether the job had not named the id yet.
func (u *usedBlocks) add(b uint32) bool {
	if u.seen != nil {
		n := len(u.seen)
		u.seen[b] = struct{}{}
		return len(u.seen) > n
	}
	if u.stamps[b] == u.stamp {
		return false
	}
	u.stamps[b] = u.stamp
	return true
}
