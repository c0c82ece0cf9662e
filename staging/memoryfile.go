package staging

// MemoryFile is a [File] in memory of this process, which devices and the CPU can use in place. A file that wraps
// another implements it too, so use [MemoryOf].
type MemoryFile interface {
	File
	// Memory returns the memory of at least the first n bytes of the file, valid until Close. A file that is open for
	// writing is made n bytes long if it is shorter; its new bytes are undefined until the caller has written them.
	// The memory is nil if the file's bytes are elsewhere.
	Memory(n int64) (Segments, error)
	// Shrink gives back the memory of a file that is open for writing from byte n on. Its size becomes n, if it was
	// larger. The first n bytes of a result of Memory stay valid.
	Shrink(n int64) error
}

// MemoryOf returns the memory of at least the first n bytes of a file, or nil if its bytes are elsewhere: see
// [MemoryFile].
func MemoryOf(f File, n int64) (Segments, error) {
	m, ok := f.(MemoryFile)
	if !ok {
		return nil, nil
	}
	return m.Memory(n)
}

// Shrink calls [MemoryFile].Shrink of a file that [MemoryOf] has returned memory of.
func Shrink(f File, n int64) error {
	if m, ok := f.(MemoryFile); ok {
		return m.Shrink(n)
	}
	return nil
}

// Segments is the memory of a file: runs of memory in the order of the file's bytes, none of them empty. They start and
// end at multiples of [Align].
type Segments [][]byte

// From returns the memory from an offset of the file to the end of its segment; nil beyond the last one.
func (s Segments) From(off int64) []byte {
	for _, mem := range s {
		if n := int64(len(mem)); off < n {
			return mem[off:]
		} else {
			off -= n
		}
	}
	return nil
}

// Read copies bytes from an offset to dst, and Write copies src to an offset. Both return the number of bytes copied,
// which is smaller only at the end of the memory.
func (s Segments) Read(dst []byte, off int64) (n int) {
	for n < len(dst) {
		m := copy(dst[n:], s.From(off+int64(n)))
		if m == 0 {
			break
		}
		n += m
	}
	return n
}

// Write is described at Read.
func (s Segments) Write(src []byte, off int64) (n int) {
	for n < len(src) {
		m := copy(s.From(off+int64(n)), src[n:])
		if m == 0 {
			break
		}
		n += m
	}
	return n
}

// Clear zeroes the bytes [off, end).
func (s Segments) Clear(off, end int64) {
	for off < end {
		mem := s.From(off)
		if len(mem) == 0 {
			return
		}
		n := min(int64(len(mem)), end-off)
		clear(mem[:n])
		off += n
	}
}
