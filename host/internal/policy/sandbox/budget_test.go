package sandbox

import "testing"

// A memory of exactly 4 GiB would have the size 0 in 32 bits.
func TestMostMemoryFitsASize(t *testing.T) {
	c := &Code{pages: 1 << 16}
	if got := c.memoryLimit(&Settings{MemoryPages: 1 << 16}); got != 1<<32-pageSize {
		t.Errorf("%d bytes", got)
	}
}
