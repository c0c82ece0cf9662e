package drive

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// Memory is host memory for the pages of a rank.
type Memory struct {
	Planes   [][]byte // for each plane its blocks, one after the other
	arena    *client.Arena
	geometry kv.Geometry
	regions  []client.PlaneRegion
}

const pageAlign = 4096

// NewMemory allocates the given number of blocks for each plane.
func NewMemory(g kv.Geometry, blocks int) (*Memory, error) {
	m := &Memory{geometry: g, regions: Regions(g, blocks)}
	var size int64
	for i := range m.regions {
		r := &m.regions[i]
		r.Offset = size
		size += (r.Stride*int64(blocks) + pageAlign - 1) &^ (pageAlign - 1)
	}
	var err error
	if m.arena, err = client.NewArena(size); err != nil {
		return nil, fmt.Errorf("drive: memory of the pages: %w", err)
	}
	for _, r := range m.regions {
		end := r.Offset + r.Stride*int64(blocks)
		m.Planes = append(m.Planes, m.arena.Bytes()[r.Offset:end:end])
	}
	return m, nil
}

// Regions returns the regions of the planes, each in an allocation of its own.
func Regions(g kv.Geometry, blocks int) (list []client.PlaneRegion) {
	for _, plane := range g.Planes {
		list = append(list, client.PlaneRegion{Stride: int64(plane.PageBytes), Blocks: uint32(blocks)})
	}
	return list
}

// Register shares the memory with the host of a session.
func (m *Memory) Register(ctx context.Context, s *client.Session, h Heads) error {
	regions, _ := h.Regions(m.geometry, m.regions)
	_, err := s.Register(ctx, GroupID, m.arena, regions)
	return err
}

// Page returns the page of a block in a plane.
func (m *Memory) Page(plane int, block uint32) []byte {
	n := int(m.regions[plane].Stride)
	return m.Planes[plane][int(block)*n:][:n:n]
}

func (m *Memory) Close() error { return m.arena.Close() }

var poison = bytes.Repeat([]byte{0xde, 0xad, 0x5e, 0xed}, 16<<10)

// Poison fills a destination before a load with bytes that no page contains.
func Poison(page []byte) {
	for len(page) > 0 {
		page = page[copy(page, poison):]
	}
}

// Blocks draws block ids at random.
type Blocks struct {
	order []uint32 // all blocks, shuffled as they are drawn
	each  int      // blocks of a chunk
	rng   *rand.Rand
}

// NewBlocks draws from all blocks of a memory.
func NewBlocks(g kv.Geometry, blocks int, seed uint64) *Blocks {
	b := &Blocks{order: make([]uint32, blocks), each: int(g.Blocks), rng: rand.New(rand.NewPCG(seed, 1))}
	for i := range b.order {
		b.order[i] = uint32(i)
	}
	return b
}

// Draw draws the blocks for some chunks. It draws no block twice.
func (b *Blocks) Draw(chunks int) [][]uint32 {
	n := chunks * b.each
	for i := range n {
		j := i + b.rng.IntN(len(b.order)-i)
		b.order[i], b.order[j] = b.order[j], b.order[i]
	}
	drawn, list := append([]uint32(nil), b.order[:n]...), make([][]uint32, chunks)
	for i := range list {
		list[i] = drawn[i*b.each:][:b.each:b.each]
	}
	return list
}
