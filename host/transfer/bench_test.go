package transfer_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
)

// The whole load and store path beside a plain loop: chunks of 2 MiB in 32 pages of 64 KiB, kvhost's store and engine
// (place and layout asked, space reserved, pages gathered and checksummed, written with O_DIRECT, published without
// replacing; opened, read, verified, scattered) against the same number of threads that create, write, rename, and then
// open and read files of the same size from one aligned buffer each. Each benchmark runs pairs, ours and the plain
// loop's, the order changing from pair to pair, and reports the median of the ratios plain time / our time with the
// quartiles. 1.0 is the plain loop's speed; more is faster.
const (
	benchFiles   = 96
	benchThreads = 8
	benchPairs   = 15
)

func BenchmarkPath(b *testing.B) {
	geo := chunk.Uniform(1, 32, 1, 64<<10)
	fileBytes := 8192 + geo.PageBytes() // header page, checksum table, payload
	for _, where := range []struct{ name, dir string }{{"disk", os.TempDir()}, {"tmpfs", "/dev/shm"}} {
		b.Run(where.name, func(b *testing.B) {
			dir, err := os.MkdirTemp(where.dir, "kvhost-bench-")
			if err != nil {
				b.Fatal(err)
			}
			defer os.RemoveAll(dir)
			for range b.N {
				var stores, loads []float64
				var ours, plain times
				for pair := range benchPairs {
					root := filepath.Join(dir, fmt.Sprint(pair))
					if pair%2 == 0 {
						ours = ourPath(b, geo, root, fileBytes)
						plain = plainLoop(b, root+"p", fileBytes)
					} else {
						plain = plainLoop(b, root+"p", fileBytes)
						ours = ourPath(b, geo, root, fileBytes)
					}
					stores = append(stores, plain.store.Seconds()/ours.store.Seconds())
					loads = append(loads, plain.load.Seconds()/ours.load.Seconds())
				}
				report(b, "store", stores)
				report(b, "load", loads)
				bytes := float64(benchFiles) * float64(geo.PageBytes()) / 1e9
				b.ReportMetric(bytes/ours.store.Seconds(), "store-GB/s")
				b.ReportMetric(bytes/ours.load.Seconds(), "load-GB/s")
			}
		})
	}
}

func report(b *testing.B, what string, ratios []float64) {
	slices.Sort(ratios)
	n := len(ratios)
	b.ReportMetric(ratios[n/2], what+"-ratio")
	b.ReportMetric(ratios[n/4], what+"-q1")
	b.ReportMetric(ratios[3*n/4], what+"-q3")
}

type times struct{ store, load time.Duration }

func ourPath(b *testing.B, geo chunk.Geometry, root string, fileBytes int64) (t times) {
	ctx := context.Background()
	s, err := store.Open(ctx, store.Config{Roots: []store.RootConfig{{Path: root, Capacity: 1 << 30}}})
	if err != nil {
		b.Fatal(err)
	}
	e, err := transfer.New(transfer.Config{Threads: benchThreads, SlotBytes: 4 << 20, MaxStaging: 2 * benchThreads * 4 << 20, ReadRatio: 0.75})
	if err != nil {
		b.Fatal(err)
	}
	q, err := e.Queue("host")
	if err != nil {
		b.Fatal(err)
	}
	space, err := s.Space(ctx, &chunk.Namespace{Model: "bench", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
		Groups: []chunk.Group{{Geometry: geo}}})
	if err != nil {
		b.Fatal(err)
	}
	var regions []transfer.HostRegion
	for range geo.Planes {
		mem, err := unix.Mmap(-1, 0, benchFiles*64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Munmap(mem)
		regions = append(regions, transfer.HostRegion{Data: mem, Stride: 64 << 10, Blocks: benchFiles})
	}
	m, err := transfer.NewHostMemory(geo, regions)
	if err != nil {
		b.Fatal(err)
	}

	warm(b, s, q, space, m)
	start := time.Now()
	job := &transfer.StoreJob{Memory: m, Read: func(transfer.Outcome) {}}
	keys := make([]chunk.Key, benchFiles)
	for n := range benchFiles {
		keys[n] = sameDirectory(n)
		parent := chunk.Root
		if n > 0 {
			parent = keys[n-1]
		}
		put, err := s.Put(ctx, store.PutRequest{Space: space, Parent: parent, Key: keys[n], Depth: uint32(n), Ranks: 1})
		if err != nil {
			b.Fatal(err)
		}
		if put.FileBytes() != fileBytes {
			b.Fatalf("files of %d bytes, the plain loop's have %d", put.FileBytes(), fileBytes)
		}
		job.Chunks = append(job.Chunks, transfer.StoreChunk{Put: put, Blocks: []uint32{uint32(n)}})
	}
	done := make(chan transfer.Outcome, 1)
	job.Published = func(o transfer.Outcome) { done <- o }
	q.Store(job)
	if o := <-done; len(o.Failed) > 0 {
		b.Fatal(o.Failed[0].Err)
	}
	t.store = time.Since(start)

	start = time.Now()
	lease, err := s.Lookup(store.LookupRequest{Space: space, Keys: keys, Ranks: 1})
	if err != nil || lease.Hits() != benchFiles {
		b.Fatal(err, lease.Hits())
	}
	load := &transfer.LoadJob{Lease: lease, Memory: m, Done: func(o transfer.Outcome) { done <- o }}
	for n := range benchFiles {
		load.Chunks = append(load.Chunks, transfer.LoadChunk{Index: n, Blocks: []uint32{uint32(benchFiles - 1 - n)}})
	}
	q.Load(load)
	if o := <-done; len(o.Failed) > 0 {
		b.Fatal(o.Failed[0].Err)
	}
	t.load = time.Since(start)
	lease.Release()
	if err := e.Close(); err != nil {
		b.Fatal(err)
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	if err := os.RemoveAll(root); err != nil {
		b.Fatal(err)
	}
	return t
}

// sameDirectory gives keys that the default naming puts into one directory, as the plain loop's files are.
func sameDirectory(n int) (k chunk.Key) {
	binary.BigEndian.PutUint64(k[8:], uint64(n)+1)
	return k
}

// warm stores one chunk, so that the directory is there and every thread has run once.
func warm(b *testing.B, s *store.Store, q *transfer.Queue, space *store.Space, m transfer.Memory) {
	put, err := s.Put(context.Background(), store.PutRequest{Space: space, Key: sameDirectory(1 << 20), Ranks: 1})
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan transfer.Outcome, 1)
	q.Store(&transfer.StoreJob{Memory: m, Chunks: []transfer.StoreChunk{{Put: put, Blocks: []uint32{0}}},
		Read: func(transfer.Outcome) {}, Published: func(o transfer.Outcome) { done <- o }})
	if o := <-done; len(o.Failed) > 0 {
		b.Fatal(o.Failed[0].Err)
	}
}

func plainLoop(b *testing.B, root string, fileBytes int64) (t times) {
	if err := os.Mkdir(root, 0o700); err != nil {
		b.Fatal(err)
	}
	fs := staging.OS()
	slots, err := staging.NewSlots(benchThreads, int(fileBytes+4095)&^4095) // the same kind of memory as ours
	if err != nil {
		b.Fatal(err)
	}
	defer slots.Close()
	buffers := make([][]byte, benchThreads)
	for i := range buffers {
		slot, err := slots.Acquire(context.Background())
		if err != nil {
			b.Fatal(err)
		}
		defer slot.Release()
		buffers[i] = slot.Bytes()[:fileBytes]
	}
	name := func(n int) string { return filepath.Join(root, fmt.Sprintf("%064x", n)) }
	parallel := func(one func(n int, buf []byte) error) time.Duration {
		start := time.Now()
		var next atomic.Int64
		var wg sync.WaitGroup
		for i := range benchThreads {
			wg.Go(func() {
				for n := int(next.Add(1)) - 1; n < benchFiles; n = int(next.Add(1)) - 1 {
					if err := one(n, buffers[i]); err != nil {
						b.Error(err)
					}
				}
			})
		}
		wg.Wait()
		return time.Since(start)
	}
	t.store = parallel(func(n int, buf []byte) error {
		f, err := staging.OpenDirect(fs, name(n)+".tmp", os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		if _, err := f.WriteAt(buf, 0); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
		return os.Rename(name(n)+".tmp", name(n))
	})
	t.load = parallel(func(n int, buf []byte) error {
		f, err := staging.OpenDirect(fs, name(n), os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		if _, err := f.ReadAt(buf, 0); err != nil {
			return err
		}
		return f.Close()
	})
	if err := os.RemoveAll(root); err != nil {
		b.Fatal(err)
	}
	return t
}
