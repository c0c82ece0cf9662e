package policy

// PathList is the paths that a place policy returned for queries, in their order. It is reused: it grows to the largest
// batch and then allocates no more.
type PathList struct {
	text  []byte
	ends  []uint32 // of each path, in text
	roots []uint32
}

// Len is the number of paths.
func (l *PathList) Len() int { return len(l.ends) }

// Path is the i-th path, valid until the next call that fills the list.
func (l *PathList) Path(i int) []byte { return l.text[l.end(i):l.ends[i]:l.ends[i]] }

// Root is the root that the policy chose for the i-th path: an index into the facts given to SetRoots, or [abi.None].
func (l *PathList) Root(i int) uint32 { return l.roots[i] }

func (l *PathList) reset() { l.text, l.ends, l.roots = l.text[:0], l.ends[:0], l.roots[:0] }

// ended records that the bytes appended to text are a path.
func (l *PathList) ended(root uint32) {
	l.ends = append(l.ends, uint32(len(l.text)))
	l.roots = append(l.roots, root)
}

// truncate drops the paths from the n-th on.
func (l *PathList) truncate(n int) {
	l.ends, l.roots = l.ends[:n], l.roots[:n]
	l.text = l.text[:l.end(n)]
}

// end is where the first n paths end in text.
func (l *PathList) end(n int) uint32 {
	if n == 0 {
		return 0
	}
	return l.ends[n-1]
}
