package policy

// Names are the paths that a place policy gave to queries, in the order of these. One is used again and again: it grows
// to the largest batch, and then takes no more memory.
type Names struct {
	text  []byte
	ends  []uint32 // of each path, in text
	roots []uint32
}

// Len is how many there are.
func (n *Names) Len() int { return len(n.ends) }

// Path is the i-th, valid until the next call that fills the Names.
func (n *Names) Path(i int) []byte { return n.text[n.end(i):n.ends[i]:n.ends[i]] }

// Root is the one that the policy chose for the i-th, an index into the facts given to SetRoots, or [abi.None].
func (n *Names) Root(i int) uint32 { return n.roots[i] }

func (n *Names) reset() { n.text, n.ends, n.roots = n.text[:0], n.ends[:0], n.roots[:0] }

// ended notes that what was appended to text is a path.
func (n *Names) ended(root uint32) {
	n.ends = append(n.ends, uint32(len(n.text)))
	n.roots = append(n.roots, root)
}

// keep drops those from the n-th on.
func (n *Names) keep(count int) {
	n.ends, n.roots = n.ends[:count], n.roots[:count]
	n.text = n.text[:n.end(count)]
}

// end is where the first so many paths end in text.
func (n *Names) end(count int) uint32 {
	if count == 0 {
		return 0
	}
	return n.ends[count-1]
}
