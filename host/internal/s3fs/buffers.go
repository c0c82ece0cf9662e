package s3fs

import "sync"

// buffers is a pool of buffers of up to one part.
type buffers struct{ pool sync.Pool }

// take returns a buffer of n bytes with any content.
func (m *buffers) take(n int) []byte {
	if b, _ := m.pool.Get().(*[]byte); b != nil && cap(*b) >= n {
		return (*b)[:n]
	}
	return make([]byte, n)
}

// give returns a buffer to the pool. Nothing may use it any more.
func (m *buffers) give(b []byte) {
	if cap(b) > 0 {
		m.pool.Put(&b)
	}
}
