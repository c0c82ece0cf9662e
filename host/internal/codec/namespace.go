package codec

import (
	"sync"
	"time"
)

const (
	// Always is the ratio of page bytes to stored bytes from which the codec is worth its time in mode [Gaining]: a
	// gain of 3 %.
	Always = 1.03
	// Usual is the expected ratio of a namespace before any of its pieces has been compressed: the ratio of bf16.
	Usual = 1.4
	// Trial is the number of pieces stored plainly for each compressed one, in a namespace that gains too little.
	Trial = 256
	// First is the number of pieces up to the first trial. The number doubles from trial to trial, up to Trial, since a single
	// trial proves little.
	First = 32
)

// window is the number of page bytes over which a ratio is computed. Older bytes count half.
const window = 64 << 20

// Namespace tracks the gain of the pieces of one namespace. It is safe for concurrent use.
type Namespace struct {
	set   *Set
	model *Model
	mode  Mode

	mu            sync.Mutex
	pages, stored int64 // bytes of the pieces compressed recently
	plain         int   // pieces since the last compressed one
	trial         int   // number of such pieces at which the next trial is made
	afresh        bool  // the next piece is a trial, and earlier pieces no longer count
}

// Compresses reports whether the next piece, with the given page bytes, should be compressed in a root that may hold compressed
// pieces. The root is asked only in mode [Faster].
func (n *Namespace) Compresses(r *Root, pages int64) bool {
	least := Always
	switch n.mode {
	case Never:
		return false
	case Faster:
		least = r.Least()
	}
	return n.gains(least, pages)
}

// Keeps reports whether a compressed piece stays compressed when it is copied to a root that may hold such pieces.
func (n *Namespace) Keeps(r *Root) bool {
	return n.mode == Gaining || n.mode == Faster && r.Least() <= Usual
}

// gains is Compresses for a least ratio.
func (n *Namespace) gains(least float64, pages int64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ratio() >= least {
		n.plain = 0
		return true
	}
	if n.plain++; n.plain < n.trial {
		n.model.plain.Add(pages)
		return false
	}
	n.plain, n.trial, n.afresh = 0, min(2*n.trial, Trial), true
	return true
}

// ratio returns the ratio of the pieces compressed recently. The lock must be held.
func (n *Namespace) ratio() float64 {
	if n.stored == 0 {
		return Usual
	}
	return float64(n.pages) / float64(n.stored)
}

// Encoded records a piece: its page bytes, its stored bytes, and the time of the codec.
func (n *Namespace) Encoded(pages, stored int64, took time.Duration) {
	n.set.encoding.Observe(pages, took)
	n.model.encoded.add(pages, stored, took)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.afresh:
		n.pages, n.stored, n.afresh = 0, 0, false
	case n.pages > window:
		n.pages, n.stored = n.pages/2, n.stored/2
	}
	n.pages, n.stored = n.pages+pages, n.stored+stored
}

// Decoded records extents that were loaded.
func (n *Namespace) Decoded(pages, stored int64, took time.Duration) {
	n.set.decoding.Observe(pages, took)
	n.model.decoded.add(pages, stored, took)
}
