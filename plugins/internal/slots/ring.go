package slots

// links are one node's neighbours in the circular list that it is part of.
type links struct{ prev, next uint32 }

// Ring threads any number of circular lists through one array of nodes. A list is known by a node that stands for both
// of its ends: next of it is the front, prev of it is the back. A node is part of one list at a time. Node numbers are
// not checked: see [Table].
type Ring struct{ nodes Array[links] } // by how much a neighbour's number is greater, so that a blank node is alone

// NewRing makes n nodes, each a list of itself.
func NewRing(n uint32) Ring { return Ring{NewArray(n, links{})} }

func (r *Ring) join(prev, next uint32) {
	r.nodes.Make(prev).next = next - prev
	r.nodes.Make(next).prev = prev - next
}

func (r *Ring) next(i uint32) uint32 { return i + r.nodes.At(i).next }

// Prev is the node towards the front.
func (r *Ring) Prev(i uint32) uint32 { return i + r.nodes.At(i).prev }

// InsertAfter links a lone node behind at.
func (r *Ring) InsertAfter(at, i uint32) {
	next := r.next(at)
	r.join(at, i)
	r.join(i, next)
}

// Remove unlinks a node and leaves it alone.
func (r *Ring) Remove(i uint32) {
	r.join(r.Prev(i), r.next(i))
	r.join(i, i)
}

// Replace puts a lone node where another is and leaves that one alone.
func (r *Ring) Replace(old, new uint32) {
	at := r.Prev(old)
	r.Remove(old)
	r.InsertAfter(at, new)
}

// Alone says whether the node is in no list (or is an empty list's end).
func (r *Ring) Alone(i uint32) bool { return r.nodes.At(i).next == 0 }
