package staging

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func BenchmarkSlots(b *testing.B) {
	b.Run("acquire", func(b *testing.B) {
		s := newSlots(b, 8, 2<<20)
		defer s.Close()
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			m, err := s.Acquire(ctx)
			if err != nil {
				b.Fatal(err)
			}
			m.Release()
		}
	})
	b.Run("contended", func(b *testing.B) {
		s := newSlots(b, 1, 4096)
		defer s.Close()
		b.ReportAllocs()
		b.SetParallelism(4)
		b.RunParallel(func(pb *testing.PB) {
			ctx := context.Background()
			for pb.Next() {
				m, err := s.Acquire(ctx)
				if err != nil {
					b.Error(err)
					return
				}
				m.Release()
			}
		})
	})
}

func BenchmarkWorkers(b *testing.B) {
	b.Run("submit", func(b *testing.B) {
		w := NewWorkers(2, 0.75)
		task := func() {}
		b.ReportAllocs()
		for b.Loop() {
			if err := w.Submit(Read, task); err != nil {
				b.Fatal(err)
			}
		}
		w.Close()
	})
	b.Run("round trip", func(b *testing.B) {
		w := NewWorkers(2, 0.75)
		done := make(chan struct{})
		task := func() { done <- struct{}{} }
		b.ReportAllocs()
		for b.Loop() {
			if err := w.Submit(Read, task); err != nil {
				b.Fatal(err)
			}
			<-done
		}
		w.Close()
	})
}

// BenchmarkDirect writes and reads back 2 MiB, through this package and by the plain system calls in turns, and gives
// the median of each and of the pairs' quotients (above 1: this package is faster).
func BenchmarkDirect(b *testing.B) {
	b.Run("disk", func(b *testing.B) { direct(b, b.TempDir()) })
	b.Run("memory", func(b *testing.B) {
		dir, err := os.MkdirTemp("/dev/shm", "kvhost-bench-")
		if err != nil {
			b.Fatal(err)
		}
		defer os.RemoveAll(dir)
		direct(b, dir)
	})
}

func direct(b *testing.B, dir string) {
	const size = 2 << 20
	f, err := OpenDirect(OS(), filepath.Join(dir, "piece"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	mem, fd := slot(b, size), int(f.Fd())
	ours := func() {
		if _, err := f.WriteAt(mem, 0); err != nil {
			b.Fatal(err)
		}
		if _, err := f.ReadAt(mem, 0); err != nil {
			b.Fatal(err)
		}
	}
	plain := func() {
		if n, err := unix.Pwrite(fd, mem, 0); n != size || err != nil {
			b.Fatal(n, err)
		}
		if n, err := unix.Pread(fd, mem, 0); n != size || err != nil {
			b.Fatal(n, err)
		}
	}
	ours() // allocates the file's blocks
	var file, base, quotient []float64
	b.ReportAllocs()
	for b.Loop() {
		first, second := ours, plain
		if len(file)%2 == 1 {
			first, second = plain, ours
		}
		start := time.Now()
		first()
		mid := time.Now()
		second()
		t, u := float64(mid.Sub(start)), float64(time.Since(mid))
		if len(file)%2 == 1 {
			t, u = u, t
		}
		file, base, quotient = append(file, t), append(base, u), append(quotient, u/t)
	}
	b.ReportMetric(median(file), "file-ns")
	b.ReportMetric(median(base), "plain-ns")
	b.ReportMetric(median(quotient), "plain/file")
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// BenchmarkSmall is the cost around a transfer, where the transfer costs next to nothing.
func BenchmarkSmall(b *testing.B) {
	name := filepath.Join(b.TempDir(), "a")
	f, err := OS().OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := make([]byte, 64)
	if _, err := f.WriteAt(p, 0); err != nil {
		b.Fatal(err)
	}
	b.Run("file", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := f.ReadAt(p, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("plain", func(b *testing.B) {
		fd := int(f.Fd())
		b.ReportAllocs()
		for b.Loop() {
			if n, err := unix.Pread(fd, p, 0); n != len(p) || err != nil {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("publish", func(b *testing.B) {
		other := name + "2"
		b.ReportAllocs()
		for b.Loop() {
			if err := OS().RenameNoReplace(name, other); err != nil {
				b.Fatal(err)
			}
			name, other = other, name
		}
	})
}
