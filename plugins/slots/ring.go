package slots

import "unsafe"

// links are one node's neighbours in the circular list that it is part of.
type links struct{ prev, next uint32 }

// Ring threads any number of circular lists through one array of nodes. A list is known by a node that stands for both
// of its ends: next of it is the front, prev of it is the back. A node is part of one list at a time. Node numbers are
// not checked: see node.
type Ring struct{ base unsafe.Pointer }

// NewRing makes n nodes, each a list of itself.
func NewRing(n uint32) Ring {
	r := Ring{unsafe.Pointer(unsafe.SliceData(make([]links, n)))}
	r.isolate(n)
	return r
}

// isolate is not inlined because the host charges each round of a loop for all of the function around it.
//
//go:noinline
func (r Ring) isolate(n uint32) {
	for i := range n {
		*r.at(i) = links{i, i}
	}
}

func (r Ring) at(i uint32) *links {
	return (*links)(unsafe.Add(r.base, uintptr(i)*unsafe.Sizeof(links{})))
}

// Prev is the node towards the front.
func (r Ring) Prev(i uint32) uint32 { return r.at(i).prev }

// InsertAfter links a lone node behind at.
func (r Ring) InsertAfter(at, i uint32) {
	next := r.at(at).next
	*r.at(i) = links{at, next}
	r.at(at).next = i
	r.at(next).prev = i
}

// Remove unlinks a node and leaves it alone.
func (r Ring) Remove(i uint32) {
	l := *r.at(i)
	r.at(l.prev).next = l.next
	r.at(l.next).prev = l.prev
	*r.at(i) = links{i, i}
}

// Replace puts a lone node where another is and leaves that one alone.
func (r Ring) Replace(old, new uint32) {
	at := r.at(old).prev
	r.Remove(old)
	r.InsertAfter(at, new)
}

// Alone says whether the node is in no list (or is an empty list's end).
func (r Ring) Alone(i uint32) bool { return r.at(i).next == i }
