package prefix

import (
	"testing"
	"unsafe"
)

// What doc.go promises about memory.
func TestSizes(t *testing.T) {
	if n := unsafe.Sizeof(slot{}); n != 48 {
		t.Errorf("a slot takes %d bytes", n)
	}
	if n := unsafe.Sizeof(segment{}); n != 64 {
		t.Errorf("a segment takes %d bytes", n)
	}
	if n := unsafe.Sizeof(Policy{}); n > 1<<19 {
		t.Errorf("the tables take %d bytes", n)
	}
	if cells > leaves {
		t.Errorf("%d cells do not fit %d leaves", cells, leaves)
	}
}
