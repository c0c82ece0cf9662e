package gds

import (
	"testing"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// TestSumsAreTheProcessors: every length to 2,500 and some beyond, at every alignment, among them the longest.
func TestSumsAreTheProcessors(t *testing.T) {
	g, _ := open(t, Config{Threads: 1, Blocks: 8})
	const size = 8 << 20
	dev := buffer(t, g, size)
	data := random(size)
	on(t, g, func(th *Thread) error { return th.Write(dev.Address, data) })
	var list []Extent
	at := uint64(0)
	for n := 0; n <= MaxExtent; {
		if at+uint64(n) > size {
			at = uint64(n % 13)
		}
		list = append(list, Extent{Offset: at, Len: uint32(n)})
		at += uint64(n) + uint64(n%5)
		switch {
		case n < 2500:
			n++
		case n < MaxExtent && n+991 > MaxExtent:
			n = MaxExtent
		default:
			n += 991
		}
	}
	for _, n := range []uint32{1024, 1025, 4096, 18432, 65535, 65536} { // aligned
		list = append(list, Extent{Offset: 4096, Len: n})
	}
	mem := slot(t, g, 1<<20, true)
	extents := unsafe.Slice((*Extent)(unsafe.Pointer(&mem[0])), len(list))
	sums := unsafe.Slice((*uint64)(unsafe.Pointer(&mem[512<<10])), len(list))
	copy(extents, list)
	on(t, g, func(th *Thread) error { return th.Sum(dev.Address, extents, sums) })
	wrong := 0
	for i, e := range list {
		if want := xxh3.Hash(data[e.Offset : e.Offset+uint64(e.Len)]); sums[i] != want && wrong < 10 {
			wrong++
			t.Errorf("%d bytes at %d: %016x, want %016x", e.Len, e.Offset, sums[i], want)
		}
	}
	on(t, g, func(th *Thread) error { return th.Sum(dev.Address, nil, nil) })
	if err := g.Do(func(th *Thread) {
		if th.Sum(dev.Address, extents, sums[:1]) == nil ||
			th.Sum(dev.Address, make([]Extent, 1), make([]uint64, 1)) == nil {
			t.Error("no room for sums, or memory that the GPU does not know, is not refused")
		}
	}); err != nil {
		t.Error(err)
	}
}
