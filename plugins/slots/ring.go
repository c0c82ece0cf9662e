package slots

// links are one node's neighbours in the circular list that it is part of.
type links struct{ prev, next uint32 }

// Ring threads any number of circular lists through one array of nodes. A list is known by a node that stands for both
// of its ends: next of it is the front, prev of it is the back. A node is part of one list at a time.
type Ring []links

// NewRing makes n nodes, each a list of itself.
func NewRing(n uint32) Ring {
	r := make(Ring, n)
	for i := range r {
		r[i] = links{uint32(i), uint32(i)}
	}
	return r
}

// Next is the node towards the back.
func (r Ring) Next(i uint32) uint32 { return r[i].next }

// Prev is the node towards the front.
func (r Ring) Prev(i uint32) uint32 { return r[i].prev }

// InsertAfter links a lone node behind at.
func (r Ring) InsertAfter(at, i uint32) {
	next := r[at].next
	r[i] = links{at, next}
	r[at].next = i
	r[next].prev = i
}

// Remove unlinks a node and leaves it alone.
func (r Ring) Remove(i uint32) {
	l := r[i]
	r[l.prev].next = l.next
	r[l.next].prev = l.prev
	r[i] = links{i, i}
}

// Replace puts a lone node where another is and leaves that one alone.
func (r Ring) Replace(old, new uint32) {
	at := r[old].prev
	r.Remove(old)
	r.InsertAfter(at, new)
}

// Alone says whether the node is in no list (or is an empty list's end).
func (r Ring) Alone(i uint32) bool { return r[i].next == i }
