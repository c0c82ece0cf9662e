package gds

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// windowed is a GPU whose threads have windows, with pages of 1,000 bytes that hold data, and a slot.
func windowed(t *testing.T, pages int) (g *GPU, dev *Buffer, data, mem []byte) {
	g, _ = open(t, Config{Threads: 2, Blocks: 8, Window: 1 << 20})
	if !g.FitsWindow(1<<20, windowExtents) || g.FitsWindow(1<<20+1, 1) || g.FitsWindow(1, windowExtents+1) {
		t.Fatal("the windows are not of the size that was asked for")
	}
	dev, data = buffer(t, g, int64(pages)*1000), random(pages*1000)
	on(t, g, func(th *Thread) error { return th.Write(dev.Address, data) })
	return g, dev, data, slot(t, g, 1<<20, true)
}

// lay puts pages end to end into the window in reverse, with a gap in the middle, and gives the extents' sums.
func lay(th *Thread, b *Batch, dev *Buffer, data []byte, pages int) (want []byte, n int, err error) {
	w := th.Window()
	want = make([]byte, pages*1000+512)
	at := 0
	for k := pages - 1; k >= 0; k-- {
		if k == pages/2 {
			at += 512
		}
		copy(want[at:], data[k*1000:(k+1)*1000])
		if err := b.Add(dev.Address+uint64(k*1000), at, 1000); err != nil {
			return nil, 0, err
		}
		at += 1000
	}
	half := (pages - 1 - pages/2) * 1000
	for _, run := range [][2]int{{0, half}, {half + 512, len(want)}} {
		for at := run[0]; at < run[1]; at += 4000 {
			w.Extents[n] = Extent{Offset: uint64(at), Len: uint32(min(4000, run[1]-at))}
			n++
		}
	}
	return want, n, nil
}

// What is gathered by a window arrives in its place with its sums, and what lies between extents is left alone.
func TestWindowCollects(t *testing.T) {
	g, dev, data, mem := windowed(t, 500)
	for i := range mem {
		mem[i] = 0xee
	}
	on(t, g, func(th *Thread) error {
		w := th.Window()
		b := w.Begin(Gather, nil)
		want, n, err := lay(th, &b, dev, data, 500)
		if err != nil {
			return err
		}
		if err := w.Collect(&b, n, mem); err != nil {
			return err
		}
		for i, e := range w.Extents[:n] {
			if w.Sums[i] != xxh3.Hash(want[e.Offset:e.Offset+uint64(e.Len)]) {
				t.Errorf("the sum of extent %d is wrong", i)
			}
		}
		half := 249 * 1000
		copy(want[half:half+512], bytes.Repeat([]byte{0xee}, 512))
		if !bytes.Equal(mem[:len(want)], want) {
			t.Error("other bytes came")
		}
		return nil
	})
}

// What is uploaded reaches the pages if all its sums are as expected, and none of it does if one is not: also where
// the batch is so long that it takes several launches.
func TestWindowScatters(t *testing.T) {
	for _, c := range []struct {
		name  string
		wrong int // extent; -1: none
		times int // that each page is written
	}{{"right", -1, 1}, {"the first is wrong", 0, 1}, {"the last is wrong", 124, 1}, {"long", -1,
		20}, {"long and wrong", 60, 20}} {
		t.Run(c.name, func(t *testing.T) {
			g, dev, data, mem := windowed(t, 500)
			poison := bytes.Repeat([]byte{0xa5}, len(data))
			on(t, g, func(th *Thread) error {
				for range 2 { // the next batch finds its gate open
					if err := th.Write(dev.Address, poison); err != nil {
						return err
					}
					w := th.Window()
					b := w.Begin(Scatter, nil)
					want, n, err := lay(th, &b, dev, data, 500)
					if err != nil {
						return err
					}
					copy(mem, want)
					for i, e := range w.Extents[:n] {
						w.Expected[i] = xxh3.Hash(want[e.Offset : e.Offset+uint64(e.Len)])
					}
					if c.wrong >= 0 {
						w.Expected[c.wrong]++
					}
					b = w.Begin(Scatter, nil)
					if err := w.Upload(&b, mem[:len(want)], 0, n); err != nil {
						return err
					}
					for range c.times {
						if _, _, err := lay(th, &b, dev, data, 500); err != nil {
							return err
						}
					}
					if err := b.Wait(); err != nil {
						return err
					}
					if x := w.Differs(n); x != c.wrong {
						t.Errorf("extent %d differs, want %d", x, c.wrong)
					}
					got := make([]byte, len(data))
					if err := th.Read(got, dev.Address); err != nil {
						return err
					}
					expect := data
					if c.wrong >= 0 {
						expect = poison
					}
					if !bytes.Equal(got, expect) {
						t.Error("the pages hold other bytes")
					}
					c.wrong = -1
				}
				return nil
			})
		})
	}
}

// A flag stops what goes through a window, and the windows are left when they do not work.
func TestWindowStops(t *testing.T) {
	g, dev, data, mem := windowed(t, 500)
	flag := g.NewFlag()
	defer flag.Release()
	flag.Set()
	on(t, g, func(th *Thread) error {
		w := th.Window()
		b := w.Begin(Gather, flag)
		_, n, err := lay(th, &b, dev, data, 500)
		if err != nil {
			return err
		}
		if err := w.Collect(&b, n, mem); !errors.Is(err, ErrStopped) {
			t.Errorf("gathered: %v", err)
		}
		b = w.Begin(Scatter, flag)
		if err := w.Upload(&b, mem, 0, 0); err != nil {
			return err
		}
		if _, _, err := lay(th, &b, dev, data, 500); err != nil {
			return err
		}
		if err := b.Wait(); !errors.Is(err, ErrStopped) {
			t.Errorf("scattered: %v", err)
		}
		if err := w.Upload(&b, mem[:2], 1<<20-1, 0); !errors.Is(err, ErrConfig) {
			t.Errorf("beyond the window: %v", err)
		}
		return w.Sync()
	})
	g.DisableWindows(ErrStopped)
	if g.FitsWindow(1, 1) {
		t.Error("a window that was left is offered")
	}
}

// Numbers of batches begin again after the last, and none that was shut before stays shut.
func TestEpochsBeginAgain(t *testing.T) {
	g, dev, data, mem := windowed(t, 4)
	on(t, g, func(th *Thread) error {
		th.epoch = 0 // the first batch is shut: the word holds 1
		for range 2 {
			w := th.Window()
			b := w.Begin(Scatter, nil)
			w.Extents[0], w.Expected[0] = Extent{Len: 1000}, xxh3.Hash(mem[:1000])+1
			if err := w.Upload(&b, mem[:1000], 0, 1); err != nil {
				return err
			}
			if err := b.Wait(); err != nil {
				return err
			}
			th.epoch = 1<<32 - 1
			b = w.Begin(Scatter, nil)
			if err := b.Add(dev.Address, 0, 1000); err != nil {
				return err
			}
			if err := b.Wait(); err != nil {
				return err
			}
			got := make([]byte, 1000)
			if err := th.Read(got, dev.Address); err != nil {
				return err
			}
			if !bytes.Equal(got, mem[:1000]) || bytes.Equal(got, data[:1000]) {
				t.Error("the batch after the last number moved nothing")
			}
			th.epoch = 0
		}
		return nil
	})
}

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
