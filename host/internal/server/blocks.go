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
