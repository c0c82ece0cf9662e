//go:build !race

package gds

import (
	"errors"
	"testing"
)

// Coding allocates nothing. Under the race detector a pool forgets what it is given, at random.
func TestCoderAllocatesNothing(t *testing.T) {
	data := make([]byte, 8*16384)
	values(data, 2)
	c := newCoded(t, Config{Threads: 1, Window: 1 << 20}, data, 16384)
	on(t, c.GPU, func(th *Thread) error {
		w, k := th.Window(), th.Coder()
		n, stored := c.cut(w, 65536), 0
		var failed error
		encode := testing.AllocsPerRun(50, func() {
			b := w.Begin(Gather, nil)
			for i := range 8 {
				failed = errors.Join(failed, b.Add(c.pages.Address+uint64(i*16384), i*16384, 16384))
			}
			var err error
			stored, err = k.Encode(&b, n, 2, 0)
			failed = errors.Join(failed, err, k.Read(c.mem[:stored]))
		})
		copy(w.Expected, w.Sums[:n])
		copy(k.Expected, k.Sums[:n])
		decode := testing.AllocsPerRun(50, func() {
			b := w.Begin(Scatter, nil)
			failed = errors.Join(failed, c.begin(k, &b, stored, n))
			for i := range 8 {
				failed = errors.Join(failed, b.Add(c.pages.Address+uint64(i*16384), i*16384, 16384))
			}
			failed = errors.Join(failed, b.Wait(), k.Check(n))
		})
		if encode > 0 || decode > 0 {
			t.Errorf("encoding allocates %g objects, decoding %g", encode, decode)
		}
		return failed
	})
}
