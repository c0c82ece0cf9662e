package replay

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
)

// pages are one rank's blocks: the memory that the host stores from and loads into.
type pages struct {
	rank     uint32
	geometry kv.Geometry
	arena    *client.Arena
	regions  []client.PlaneRegion
	content  payload.Content
	order    []uint32 // all block ids, shuffled as they are drawn
	rng      *rand.Rand
}

const pageAlign = 4096

// newPages allocates pages for the chunks and one more, so that a draw has a choice.
func newPages(s *client.Session, rank uint32, g kv.Geometry, c payload.Content, chunks int) (*pages, error) {
	p := &pages{rank: rank, geometry: g, content: c, rng: rand.New(rand.NewPCG(uint64(rank), 1))}
	blocks := uint32(chunks+1) * g.Blocks
	var size int64
	for _, plane := range g.Planes {
		p.regions = append(p.regions, client.PlaneRegion{Offset: size, Stride: int64(plane.PageBytes), Blocks: blocks})
		size += (int64(plane.PageBytes)*int64(blocks) + pageAlign - 1) &^ (pageAlign - 1)
	}
	var err error
	if p.arena, err = s.NewArena(size); err != nil {
		return nil, err
	}
	p.order = make([]uint32, blocks)
	for i := range p.order {
		p.order[i] = uint32(i)
	}
	return p, nil
}

func (p *pages) register(ctx context.Context, s *client.Session) error {
	if _, err := s.Register(ctx, groupID, p.arena, p.regions); err != nil {
		return fmt.Errorf("replay: rank %d: %w", p.rank, err)
	}
	return nil
}

// draw draws the block ids of n chunks at random among all blocks. They are valid until the next draw.
func (p *pages) draw(chunks int) []uint32 {
	n := chunks * int(p.geometry.Blocks)
	for i := range n {
		j := i + p.rng.IntN(len(p.order)-i)
		p.order[i], p.order[j] = p.order[j], p.order[i]
	}
	return p.order[:n]
}

// of are the drawn block ids of the i-th chunk.
func (p *pages) of(drawn []uint32, i int) []uint32 {
	n := int(p.geometry.Blocks)
	return drawn[i*n : (i+1)*n : (i+1)*n]
}

func (p *pages) page(plane int, block uint32) []byte {
	r := &p.regions[plane]
	at := r.Offset + int64(block)*r.Stride
	return p.arena.Bytes()[at : at+int64(p.geometry.Planes[plane].PageBytes)]
}

// fill writes the content of a chunk to its blocks.
func (p *pages) fill(key *kv.Key, blocks []uint32) {
	for plane := range p.geometry.Planes {
		for i, b := range blocks {
			p.content.Fill(p.page(plane, b), payload.Seed(key, p.rank, p.geometry.Planes[plane], uint32(i)))
		}
	}
}

func (p *pages) poison(blocks []uint32) {
	for plane := range p.geometry.Planes {
		for _, b := range blocks {
			poisonPage(p.page(plane, b))
		}
	}
}

// check counts the wrong bytes of a chunk.
func (p *pages) check(key *kv.Key, blocks []uint32) int64 {
	var wrong int64
	for plane := range p.geometry.Planes {
		for i, b := range blocks {
			wrong += p.content.Mismatches(p.page(plane, b), payload.Seed(key, p.rank, p.geometry.Planes[plane], uint32(i)))
		}
	}
	return wrong
}

// poison fills a destination page before a load. No page has this content.
var poison = bytes.Repeat([]byte{0xde, 0xad, 0x5e, 0xed}, 16<<10)

func poisonPage(page []byte) {
	for len(page) > 0 {
		page = page[copy(page, poison):]
	}
}
