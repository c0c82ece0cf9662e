package memfs

import (
	"os"
	"testing"

	"github.com/kvhost/kvhost/staging"
)

// A piece's life in a full root: its victim's file is renamed, opened, used in place and published; then it is opened
// for a load.
func BenchmarkPiece(b *testing.B) {
	f := newFS(b, 256<<20)
	f.Start(nil)
	<-f.Grown()
	const size = 32<<20 + 8192
	if err := f.MkdirAll("/root/0123456789abcdef/aa/b", 0o700); err != nil {
		b.Fatal(err)
	}
	names := [...]string{"/root/0123456789abcdef/aa/b/first.kv", "/root/0123456789abcdef/aa/b/second.kv"}
	const temp = "/root/0123456789abcdef/aa/b/.temporary"
	if file := create(b, f, names[0]); true {
		if _, err := staging.MemoryOf(file, size); err != nil {
			b.Fatal(err)
		}
		file.Close()
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := f.Rename(names[i%2], temp); err != nil {
			b.Fatal(err)
		}
		for _, flag := range [...]int{os.O_RDWR, os.O_RDONLY} {
			file, err := f.OpenFile(temp, flag, 0)
			if err != nil {
				b.Fatal(err)
			}
			if mem, err := staging.MemoryOf(file, size); err != nil || len(mem) != 1 {
				b.Fatal(err)
			}
			if err := file.Close(); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.RenameNoReplace(temp, names[(i+1)%2]); err != nil {
			b.Fatal(err)
		}
	}
}

// Allocation in a full file system of 10,000 files, one of ten of which was removed.
func BenchmarkAllocate(b *testing.B) {
	var a allocator
	var held []extent
	for range 64 {
		a.add(1 << 30 / page)
	}
	for ok := true; ok; {
		var e []extent
		if e, ok = a.alloc(1000+int64(len(held)%7)*100, nil); ok {
			held = append(held, e...)
		}
	}
	for i := 0; i < len(held); i += 10 {
		a.release(held[i])
	}
	var list []extent
	b.ReportAllocs()
	for b.Loop() {
		var ok bool
		if list, ok = a.alloc(1250, list[:0]); !ok {
			b.Fatal("full")
		}
		for _, e := range list {
			a.release(e)
		}
	}
}
