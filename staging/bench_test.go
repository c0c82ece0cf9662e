package staging

import (
	"context"
	"os"
	"path/filepath"
	"testing"

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
			must(b, err)
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
			must(b, w.Submit(Read, task))
		}
		w.Close()
	})
	b.Run("round trip", func(b *testing.B) {
		w := NewWorkers(2, 0.75)
		done := make(chan struct{})
		task := func() { done <- struct{}{} }
		b.ReportAllocs()
		for b.Loop() {
			must(b, w.Submit(Read, task))
			<-done
		}
		w.Close()
	})
}

// BenchmarkSmall is the cost around a transfer, where the transfer costs next to nothing.
func BenchmarkSmall(b *testing.B) {
	name := filepath.Join(b.TempDir(), "a")
	f, err := OS().OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	must(b, err)
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
			must(b, OS().RenameNoReplace(name, other))
			name, other = other, name
		}
	})
}
