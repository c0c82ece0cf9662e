package replay

import (
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
)

// pages are the blocks of one rank. The content of each follows from its chunk's key, the rank, the layer and the block.
type pages struct {
	rank     uint32
	geometry kv.Geometry
	memory   *drive.Memory
	blocks   *drive.Blocks
	content  payload.Content
}

// newPages allocates pages for the chunks and for one more, so that a draw has a choice.
func newPages(rank uint32, g kv.Geometry, c payload.Content, chunks int) (*pages, error) {
	blocks := (chunks + 1) * int(g.Blocks)
	m, err := drive.NewMemory(g, blocks)
	if err != nil {
		return nil, err
	}
	return &pages{rank: rank, geometry: g, memory: m, blocks: drive.NewBlocks(g, blocks, uint64(rank)), content: c}, nil
}

// each calls do for the pages of a chunk.
func (p *pages) each(c *client.StoreChunk, do func(page []byte, seed uint64)) {
	for plane := range p.geometry.Planes {
		for i, b := range c.Blocks {
			do(p.memory.Page(plane, b), payload.Seed(&c.Key, p.rank, p.geometry.Planes[plane], uint32(i)))
		}
	}
}

// fill writes the content of a prompt's chunks to their blocks.
func (p *pages) fill(prompt *drive.Prompt) {
	for i := range prompt.Chunks {
		p.each(&prompt.Chunks[i], p.content.Fill)
	}
}

func (p *pages) poison(prompt *drive.Prompt) {
	for i := range prompt.Chunks {
		p.each(&prompt.Chunks[i], func(page []byte, _ uint64) { drive.Poison(page) })
	}
}

// check counts the wrong bytes of a chunk.
func (p *pages) check(c *client.StoreChunk) (wrong int64) {
	p.each(c, func(page []byte, seed uint64) { wrong += p.content.Mismatches(page, seed) })
	return wrong
}
