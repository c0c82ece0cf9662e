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
	head   *moves.Head      // head of the piece

	mu   sync.Mutex
	have []bool // by extent
	left int    // number of missing extents
}

// nearingShare is the part of the nearest level that running loads may fill, because these entries cannot be evicted until the
// loads end.
const nearingShare = 0.25

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
