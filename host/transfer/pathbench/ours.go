package pathbench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
)

// key is of the n-th chunk of a round.
func (b *bench) key(round, n int) (k chunk.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(round*b.Chunks+n)*0x9e3779b97f4a7c15+1)
	k[31] = 1
	return k
}

// storeAll stores all chunks in one job.
func (b *bench) storeAll(ctx context.Context, round int, ids [][]uint32) error {
	done := make(chan transfer.Outcome, 1)
	job := &transfer.StoreJob{Memory: b.pages.memory(), Read: func(transfer.Outcome) {},
		Published: func(o transfer.Outcome) { done <- o }}
	for n := range b.Chunks {
		parent := chunk.Root
		if n > 0 {
			parent = b.key(round, n-1)
		}
		p, err := b.store.Put(ctx, store.PutRequest{Namespace: b.space, Parent: parent, Key: b.key(round, n),
			Depth: uint32(n), Ranks: 1})
		if err != nil {
			for _, c := range job.Chunks {
				c.Put.Abort(err)
			}
			return err
		}
		b.size = p.FileBytes()
		job.Chunks = append(job.Chunks, transfer.StoreChunk{Put: p, Blocks: ids[n]})
	}
	b.queue.Store(job)
	return failure(<-done)
}

func failure(o transfer.Outcome) error {
	if len(o.Failed) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d, chunk %d: %w", ErrPath, len(o.Failed), o.Failed[0].Chunk, o.Failed[0].Err)
}

// loadAll loads all chunks in one job.
func (b *bench) loadAll(round int, ids [][]uint32, layers *transfer.Layers) error {
	var keys []chunk.Key
	for n := range b.Chunks {
		keys = append(keys, b.key(round, n))
	}
	l, err := b.store.Lookup(store.LookupRequest{Namespace: b.space, Keys: keys, Ranks: 1})
	if err != nil {
		return err
	}
	defer l.Release()
	if l.Hits() != b.Chunks {
		return fmt.Errorf("%w: %d of %d are there", ErrPath, l.Hits(), b.Chunks)
	}
	done := make(chan transfer.Outcome, 1)
	job := &transfer.LoadJob{Lease: l, Memory: b.pages.memory(), Layers: layers,
		Done: func(o transfer.Outcome) { done <- o }}
	for n := range b.Chunks {
		job.Chunks = append(job.Chunks, transfer.LoadChunk{Index: n, Blocks: ids[n]})
	}
	b.queue.Load(job)
	return failure(<-done)
}

// loadLayers is loadAll layer by layer, and notes when the first layer was there.
func (b *bench) loadLayers(round int, ids [][]uint32) error {
	start := time.Now()
	b.first = 0
	return b.loadAll(round, ids, &transfer.Layers{Landed: func(uint32, []int) {
		if b.first == 0 {
			b.first = time.Since(start)
		}
	}})
}

// remember notes which piece files are new since it was last asked.
func (b *bench) remember() error {
	b.files = nil
	root := filepath.Join(b.Dir, "root")
	return staging.Walk(context.Background(), b.FS, root, 1, func(rel string, _ fs.DirEntry) {
		if name := filepath.Join(root, rel); !b.known[name] {
			b.known[name] = true
			b.files = append(b.files, name)
		}
	}, func(string, error) {})
}

// forget removes the last round's files behind the store's back, so that this round's take the same memory and the same
// part of the disk: memory that the machine has not used before costs its first user more, and files that stay are written
// back beside what is timed. What the store thinks of past rounds does not matter here.
func (b *bench) forget() error {
	for _, name := range b.files {
		if err := b.FS.Remove(name); err != nil {
			return err
		}
	}
	b.files = nil
	return nil
}

// remove removes a directory, by the file system that tells of removed files.
func (b *bench) remove(dir string) error {
	list, err := b.FS.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		if name := filepath.Join(dir, e.Name()); e.IsDir() {
			err = errors.Join(err, b.remove(name))
		} else {
			err = errors.Join(err, b.FS.Remove(name))
		}
	}
	return errors.Join(err, b.FS.Remove(dir))
}

// warm reads the files of the page cache twice, untimed: the first reads of a fresh file move its pages from one of the
// kernel's lists to another, which takes as long as reading does, and would be charged to whoever reads first.
func (b *bench) warm(ctx context.Context) error {
	f, err := staging.OpenDirect(b.FS, b.files[0], os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	f.Close()
	for n := 0; n < 2 && !f.Direct() && err == nil; n++ {
		err = b.readFiles(ctx)
	}
	return err
}
