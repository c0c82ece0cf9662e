package gds

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkCoder tells a rate of page bytes, between device memory and page-locked memory, on a real GPU only.
func BenchmarkCoder(b *testing.B) {
	for _, element := range []int{2, 1} {
		for _, window := range []int{1 << 20, 4 << 20, 16 << 20, 64 << 20} {
			for _, threads := range []int{1, 4, 16} {
				b.Run(fmt.Sprintf("%d bits/%d MiB/%d threads", 8*element, window>>20, threads), func(b *testing.B) {
					benchmarkCoder(b, window, threads, element)
				})
			}
		}
	}
}

func benchmarkCoder(b *testing.B, window, threads, element int) {
	const page = 32 << 10
	data := make([]byte, window)
	values(data, element)
	c := newCoded(b, Config{Threads: threads, Window: window}, data, page)
	times := max(1, 256<<20/window/threads) // of each thread in one round
	if c.double != nil {
		times = 1
		if window > 4<<20 {
			b.Skip("for a real GPU")
		}
	}
	var first *Coder
	size := 0
	on(b, c.GPU, func(th *Thread) error {
		n, stored, err := c.encode(th, MaxExtent, element)
		first, size = &Coder{Stored: slices.Clone(th.coder.Stored[:n]), Sums: slices.Clone(th.coder.Sums[:n]),
			Expected: slices.Clone(th.window.Sums[:n])}, stored
		return err
	})
	mems := make([][]byte, threads)
	for i := range mems {
		mems[i] = slot(b, c.GPU, window, true)
		copy(mems[i], c.mem[:size])
	}
	// all runs one operation of each thread at a time, and returns how long they took.
	all := func(fn func(th *Thread, mem []byte) error) time.Duration {
		var wg sync.WaitGroup
		began := time.Now()
		for _, mem := range mems {
			wg.Go(func() {
				for range times {
					var err error
					if lost := c.Do(func(th *Thread) { err = fn(th, mem) }); lost != nil || err != nil {
						b.Error(lost, err)
						return
					}
				}
			})
		}
		wg.Wait()
		return time.Since(began)
	}
	encode := func(th *Thread, mem []byte) error {
		w, k := th.Window(), th.Coder()
		batch := w.Begin(Gather, nil)
		for i, p := range c.order {
			if err := batch.Add(c.pages.Address+uint64(p*page), i*page, page); err != nil {
				return err
			}
		}
		stored, err := k.Encode(&batch, c.cut(w, MaxExtent), element, 0)
		if err != nil {
			return err
		}
		return k.Read(mem[:stored])
	}
	decode := func(th *Thread, mem []byte) error {
		w, k := th.Window(), th.Coder()
		n := c.cut(w, MaxExtent)
		copy(k.Stored, first.Stored)
		copy(k.Expected, first.Sums)
		copy(w.Expected, first.Expected)
		batch := w.Begin(Scatter, nil)
		at, err := k.Upload(&batch, mem[:size])
		if err == nil {
			err = k.Decode(&batch, at, n)
		}
		for i, p := range c.order {
			if err == nil {
				err = batch.Add(c.pages.Address+uint64(p*page), i*page, page)
			}
		}
		if err == nil {
			err = batch.Wait()
		}
		if err != nil {
			return errors.Join(err, w.Sync())
		}
		return k.Check(n)
	}
	all(encode)
	all(decode)
	var encoding, decoding time.Duration
	rounds := 0
	for b.Loop() {
		encoding += all(encode)
		decoding += all(decode)
		rounds++
	}
	on(b, c.GPU, func(th *Thread) error {
		right, _, err := c.holds(th)
		if !right {
			b.Error("other bytes came back")
		}
		return err
	})
	b.ReportMetric(float64(window)/float64(size), "ratio")
	if c.double == nil {
		bytes := float64(rounds*threads*times) * float64(window) / 1e9
		b.ReportMetric(bytes/encoding.Seconds(), "encode-GB/s")
		b.ReportMetric(bytes/decoding.Seconds(), "decode-GB/s")
	}
}
