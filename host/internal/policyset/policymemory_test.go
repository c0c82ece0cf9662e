package policyset

import "testing"

func TestMemoryFor(t *testing.T) {
	if got := memoryFor(5 << 20); got != 5<<20 {
		t.Errorf("configured: %d", got)
	}
	if got := memoryFor(0); got < 16<<20 {
		t.Errorf("a quarter of the machine: %d bytes", got)
	}
}
