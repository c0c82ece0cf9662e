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

// BenchmarkDirect writes and reads back 2 MiB, through this package and by the plain system calls.
func BenchmarkDirect(b *testing.B) {
	const size = 2 << 20
	for _, where := range []struct{ name, dir string }{{"disk", b.TempDir()}, {"memory", ""}} {
		if where.dir == "" {
			dir, err := os.MkdirTemp("/dev/shm", "kvhost-bench-")
			if err != nil {
				b.Fatal(err)
			}
			defer os.RemoveAll(dir)
			where.dir = dir
		}
		f, err := OpenDirect(OS(), filepath.Join(where.dir, "piece"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			b.Fatal(err)
		}
		mem := slot(b, size)
		b.Run(where.name+"/file", func(b *testing.B) {
			b.SetBytes(2 * size)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.WriteAt(mem, 0); err != nil {
					b.Fatal(err)
				}
				if _, err := f.ReadAt(mem, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(where.name+"/plain", func(b *testing.B) {
			fd := int(f.Fd())
			b.SetBytes(2 * size)
			b.ReportAllocs()
			for b.Loop() {
				if n, err := unix.Pwrite(fd, mem, 0); n != size || err != nil {
					b.Fatal(n, err)
				}
				if n, err := unix.Pread(fd, mem, 0); n != size || err != nil {
					b.Fatal(n, err)
				}
			}
		})
		f.Close()
	}
}

// BenchmarkSmall is the cost around a transfer, where the transfer costs next to nothing.
func BenchmarkSmall(b *testing.B) {
	name := filepath.Join(b.TempDir(), "a")
	for _, c := range []struct {
		name string
		fs   FS
	}{{"os", OS()}, {"faulty", Faulty(OS())}} {
		f, err := c.fs.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			b.Fatal(err)
		}
		p := make([]byte, 64)
		if _, err := f.WriteAt(p, 0); err != nil {
			b.Fatal(err)
		}
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.ReadAt(p, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(c.name+"/plain", func(b *testing.B) {
			fd := int(f.Fd())
			b.ReportAllocs()
			for b.Loop() {
				if n, err := unix.Pread(fd, p, 0); n != len(p) || err != nil {
					b.Fatal(n, err)
				}
			}
		})
		f.Close()
	}
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
