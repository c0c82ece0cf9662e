package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// each calls fn for every number below n, on the given number of goroutines, each with a slot.
func (b *bench) each(ctx context.Context, goroutines, n int, fn func(i int, slot []byte) error) error {
	var next atomic.Int64
	work, ctx := errgroup.WithContext(ctx)
	for range goroutines {
		work.Go(func() error {
			slot, err := b.slots.Acquire(ctx)
			if err != nil {
				return err
			}
			defer slot.Release()
			for i := next.Add(1) - 1; i < int64(n) && ctx.Err() == nil; i = next.Add(1) - 1 {
				if err := fn(int(i), slot.Bytes()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return work.Wait()
}

// copyAll copies each page between its place and a slot, as many at a time as fit, and does nothing else.
func (b *bench) copyAll(ctx context.Context, dir gds.Direction) error {
	var batches [][]move
	var batch []move
	at, blocks := 0, b.Chunks*int(b.Geometry.Blocks)
	for k := range blocks {
		for plane, p := range b.Geometry.Planes {
			if n := int(p.PageBytes); at+n > b.SlotBytes {
				batches, batch, at = append(batches, batch), nil, 0
			}
			batch = append(batch, move{plane: plane, block: k * 7919 % blocks, at: at})
			at += (int(p.PageBytes) + 15) &^ 15
		}
	}
	batches = append(batches, batch)
	return b.each(ctx, b.Copiers, len(batches), func(i int,
		slot []byte) error {
		return b.pages.copy(dir, slot, batches[i])
	})
}

// plainFile returns the name of a file of the plain threads.
func (b *bench) plainFile(round, i int) string {
	return filepath.Join(b.Dir, "plain", fmt.Sprintf("%d-%d", round, i))
}

// writeFiles writes files of the size that a store writes, first under another name.
func (b *bench) writeFiles(ctx context.Context, round int) error {
	if err := b.FS.MkdirAll(filepath.Join(b.Dir, "plain"), 0o755); err != nil {
		return err
	}
	size := (b.Geometry.PageBytes() + 8191) &^ 4095
	return b.each(ctx, b.Threads, b.Chunks, func(i int, slot []byte) error {
		name := b.plainFile(round, i)
		f, err := staging.OpenDirect(b.FS, name+".tmp", os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		if b.Direct != nil {
			err = b.bare(f, size, (*gds.DirectSlot).Write)
		}
		for off := int64(0); b.Direct == nil && err == nil && off < size; off += int64(len(slot)) {
			_, err = f.WriteAt(slot[:min(int64(len(slot)), size-off)], off)
		}
		if err != nil {
			return err
		}
		return b.FS.Rename(name+".tmp", name)
	})
}

// readFiles reads the files that writeFiles wrote in a round.
func (b *bench) readFiles(ctx context.Context, round int) error {
	return b.each(ctx, b.Threads, b.Chunks, func(i int, slot []byte) error {
		f, err := staging.OpenDirect(b.FS, b.plainFile(round, i), os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if b.Direct != nil && err == nil {
			return b.bare(f, info.Size, func(s *gds.DirectSlot, fd int, _, to int64) error { return s.Read(fd, to) })
		}
		for off := int64(0); err == nil && off < info.Size; off += int64(len(slot)) {
			_, err = f.ReadAt(slot[:min(int64(len(slot)), info.Size-off)], off)
		}
		return err
	})
}

// bare moves a file between storage and a slot of device memory by cuFile, and does nothing else.
func (b *bench) bare(f staging.File, size int64, move func(s *gds.DirectSlot, fd int, from, to int64) error) error {
	slot, err := b.Direct.Acquire(size, 4096, 1)
	if err != nil {
		return err
	}
	defer slot.Release()
	return move(slot, int(f.Fd()), 0, size)
}

// remove removes a directory through the file system that reports removed files.
func remove(f staging.FS, dir string) error {
	list, err := f.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		if name := filepath.Join(dir, e.Name()); e.IsDir() {
			err = errors.Join(err, remove(f, name))
		} else {
			err = errors.Join(err, f.Remove(name))
		}
	}
	return errors.Join(err, f.Remove(dir))
}

// TakesDirectIO reports whether the file system of a directory supports O_DIRECT.
func TakesDirectIO(dir string) bool {
	temp, err := os.MkdirTemp(dir, ".kvhost-bench-")
	if err != nil {
		return false
	}
	defer os.RemoveAll(temp)
	f, err := staging.OpenDirect(staging.OS(), filepath.Join(temp, "trial"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return false
	}
	defer f.Close()
	return f.Direct()
}
