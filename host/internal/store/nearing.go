package store

import (
	"context"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/staging"
)

// nearing is a copy of a piece in the nearest level, in memory, made from the buffers of the load that reads the piece. So what is loaded from
// a disk comes near at once, however busy the disk is with loads, and its bytes are read once. Package moves copies what does not come
// so: what no load reads whole, entries of several ranks, compressed pieces, and pieces that go from the file to the GPU directly.
type nearing struct {
	entry  *moves.Entry
	level  *level // that it goes to
	size   int64
	put    *Put
	memory staging.Segments // of the put's file
	head   *Head            // of the piece

	mu   sync.Mutex
	have []bool // by extent
	left int    // extents that are not there yet
}

// nearingShare is the part of the nearest level that loads may fill at a time: until they end it cannot be evicted.
const nearingShare = 0.25

// Keep copies extents [lo, hi), which a load has verified, to the nearest level if the piece comes nearer so. src has the payload from base on.
func (p *Piece) Keep(lo, hi int, src []byte, base int64) {
	if !p.isLoad || p.head.Compressed || p.root.level == p.root.store.levels[0] {
		return
	}
	p.nearer.Do(p.comeNearer)
	if p.copied != nil {
		p.copied.keep(lo, hi, src, base)
	}
}

// comeNearer begins the copy, if the nearest level is in memory and wants it.
func (p *Piece) comeNearer() {
	r, nearest := p.root, p.root.store.levels[0]
	if near := nearest.roots[0].cfg; !near.Volatile || near.Compressed { // what is compressed on the way is so in the background
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
	if v.Pieces != 1<<p.rank { // another rank's came since
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
		v.EndHere(moves.ErrCancelled) // a copy in the background compresses it on the way
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

// end publishes the copy if the load has read all of the piece.
func (n *nearing) end() {
	defer n.level.nearing.Add(-n.size)
	if n.left > 0 {
		n.put.Abort(moves.ErrCancelled)
		n.entry.EndHere(moves.ErrCancelled)
		return
	}
	at := n.head.DataOffset
	for x := range n.have { // what lies between the extents came with some of the reads only
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
