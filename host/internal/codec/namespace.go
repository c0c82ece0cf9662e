package codec

import (
	"sync"
	"time"
)

const (
	// Always is the ratio of page bytes to stored bytes that is worth the time of the codec where compression is wanted
	// anyhow: three in a hundred.
	Always = 1.03
	// Usual is the ratio that is expected of a namespace of which nothing has been compressed yet: that of bf16.
	Usual = 1.4
	// Trial is how many pieces of a namespace that gains too little are stored as they are for each one that is compressed.
	Trial = 256
	// First is which piece of a namespace is the first trial: it is compared with those before it. Twice as many follow until
	// the next, up to Trial, since one trial says little.
	First = 32
)

// window is how many page bytes a ratio is about: when there are more, the older ones count half.
const window = 64 << 20

// Namespace is what the pieces of one namespace have gained. It is safe for concurrent use.
type Namespace struct {
	set   *Set
	model *Model
	mode  Mode

	mu            sync.Mutex
	pages, stored int64 // of the pieces that were compressed lately
	plain         int   // pieces since the last of them
	trial         int   // of them is the next trial
	afresh        bool  // the next one is a trial: what was before does not count
}

// Compresses says whether the next piece is to be compressed in a root that may hold compressed pieces. It has so many page
// bytes. The root is asked in mode [Faster] alone.
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

// Keeps says whether a piece that is compressed stays so in a root that may hold such pieces.
func (n *Namespace) Keeps(r *Root) bool {
	return n.mode == Gaining || n.mode == Faster && r.Least() <= Usual
}

// gains is Compresses where a ratio from least on is worth it.
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

// ratio is that of the pieces that were compressed lately. The lock is held.
func (n *Namespace) ratio() float64 {
	if n.stored == 0 {
		return Usual
	}
	return float64(n.pages) / float64(n.stored)
}

// Encoded enters a piece: its page bytes, what is stored of them, and the time of the codec.
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

// Decoded enters extents that were loaded.
func (n *Namespace) Decoded(pages, stored int64, took time.Duration) {
	n.set.decoding.Observe(pages, took)
	n.model.decoded.add(pages, stored, took)
}
