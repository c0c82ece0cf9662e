package s3fs

import "sync"

// buffers are buffers of up to a part, which are used again.
type buffers struct{ pool sync.Pool }

// take returns a buffer of so many bytes, which hold anything.
func (m *buffers) take(n int) []byte {
	if b, _ := m.pool.Get().(*[]byte); b != nil && cap(*b) >= n {
		return (*b)[:n]
	}
	return make([]byte, n)
}

// give takes a buffer back that nothing reads or writes any more.
func (m *buffers) give(b []byte) {
	if cap(b) > 0 {
		m.pool.Put(&b)
	}
}
