package store

import (
	"context"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/staging"
)

// nearing is a copy of a piece to the nearest level, in memory, that is made from the buffers of the load that reads the piece.
// An entry that is loaded from a disk thereby comes near at once, even if the disk is busy with loads, and its bytes are read
// only once. Package moves copies all other entries: pieces that no load reads completely, entries of several ranks, compressed
// pieces, and pieces that go directly from the file to the GPU.
type nearing struct {
	entry  *moves.Entry
	level  *level // destination
	size   int64
	put    *Put
	memory staging.Segments // memory of the put's file
	head   *Head            // head of the piece

	mu   sync.Mutex
	have []bool // by extent
	left int    // number of missing extents
}

// nearingShare is the part of the nearest level that running loads may fill, because these entries cannot be evicted until the
// loads end.
const nearingShare = 0.25

// Keep copies the extents [lo, hi), which a load has verified, to the nearest level if the piece is being copied there. src
// holds the payload from offset base on.
func (p *Piece) Keep(lo, hi int, src []byte, base int64) {
	if !p.isLoad || p.head.Compressed || p.root.level == p.root.store.levels[0] {
		return
	}
	p.nearer.Do(p.comeNearer)
	if p.copied != nil {
		p.copied.keep(lo, hi, src, base)
	}
}

// comeNearer begins the copy if the nearest level is in memory and wants the piece.
func (p *Piece) comeNearer() {
	r, nearest := p.root, p.root.store.levels[0]
	if near := nearest.roots[0].cfg; !near.Volatile || near.Compressed { // a copy that must be compressed is made in the background
		return
	}
	size := p.header.FileBytes()
	if room := int64(nearingShare * float64(nearest.roots[0].cfg.Capacity)); nearest.nearing.Add(size) > room {
		nearest.nearing.Add(-size)
		return
	}
	defer func() {
		if p.copied == nil {
			nearest.nearing.Add(-size)
		}
	}()
	r.Lock()
	if r.Index.Pieces(p.mark.Slot) != 1<<p.rank {
		r.Unlock()
		return
	}
	m := r.Moves.Take(p.mark.Slot)
	r.Unlock()
	if m == nil {
		return
	}
	v := &moves.Entry{Move: m, Kind: moves.Promotion, From: &r.origin, To: nearest}
	if !v.BeginHere() {
		return
	}
	if v.Pieces != 1<<p.rank { // a piece of another rank has arrived in between
		v.EndHere(moves.ErrCancelled)
		return
	}
	to, err := nearest.Begin(context.Background(), v, &p.header)
	if err != nil {
		v.EndHere(err)
		return
	}
	t := to.(movedTo)
	memory, err := staging.MemoryOf(t.File, t.size)
	if err != nil || memory == nil || t.Compresses() {
		t.Abort(moves.ErrCancelled)
		v.EndHere(moves.ErrCancelled) // a background copy compresses the piece
		return
	}
	extents := len(p.head.Plan.Extents())
	p.copied = &nearing{entry: v, level: nearest, size: size, put: t.Put, memory: memory, head: &p.head, have: make([]bool, extents), left: extents}
}

func (n *nearing) keep(lo, hi int, src []byte, base int64) {
	from, _ := n.head.At(lo)
	_, to := n.head.At(hi - 1)
	n.memory.Write(src[from-n.head.DataOffset-base:to-n.head.DataOffset-base], from)
	n.mu.Lock()
	defer n.mu.Unlock()
	for x := lo; x < hi; x++ {
		if !n.have[x] {
			n.have[x] = true
			n.left--
		}
	}
}

// end publishes the copy if the load has read the whole piece.
func (n *nearing) end() {
	defer n.level.nearing.Add(-n.size)
	if n.left > 0 {
		n.put.Abort(moves.ErrCancelled)
		n.entry.EndHere(moves.ErrCancelled)
		return
	}
	at := n.head.DataOffset
	for x := range n.have { // the bytes between extents came only with some of the reads
		from, to := n.head.At(x)
		n.memory.Clear(at, from)
		at = to
	}
	n.memory.Clear(at, n.put.size)
	head := make([]byte, n.head.DataOffset)
	n.put.Head(head, n.head.Table)
	n.memory.Write(head, 0)
	n.entry.EndHere(n.put.Publish(context.Background()))
}
