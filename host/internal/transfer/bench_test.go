package transfer_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// The whole load and store path beside a plain loop: chunks of 2 MiB in 32 pages of 64 KiB, kvhost's store and engine
// (place and layout asked, space reserved, pages gathered and checksummed, written with O_DIRECT, published without
// replacing; opened, read, verified, scattered) against the same number of threads that create, write, rename, and then
// open and read files of the same size from one buffer each. Both write all their files into one directory, from and to
// memory that has been used before. Passes alternate, ours and the plain loop's, and so does their order; the first
// pair is not counted. Reported are the medians of the ratios plain time / our time with the quartiles (1.0 is the
// plain loop's speed; more is faster), and the processor time of both per GB in the last pair.
const (
	benchFiles   = 96
	benchThreads = 8
	benchPairs   = 15
)

func BenchmarkPath(b *testing.B) {
	geo := kv.Uniform(1, 32, 1, 64<<10)
	for _, where := range []struct{ name, dir string }{{"disk", os.TempDir()}, {"tmpfs", "/dev/shm"}} {
		b.Run(where.name, func(b *testing.B) {
			for range b.N {
				dir, err := os.MkdirTemp(where.dir, "kvhost-bench-")
				if err != nil {
					b.Fatal(err)
				}
				comparePaths(b, geo, dir)
				if err := os.RemoveAll(dir); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// times of one pass.
type times struct{ store, storeCPU, load, loadCPU time.Duration }

func comparePaths(b *testing.B, geo kv.Geometry, dir string) {
	ours := newOurPath(b, geo, filepath.Join(dir, "ours"))
	defer ours.close()
	plain := newPlainLoop(b, filepath.Join(dir, "plain"), ours.fileBytes)
	defer plain.slots.Close()
	var stores, loads []float64
	var o, p times
	for pair := range benchPairs + 1 {
		if pair%2 == 0 {
			o, p = ours.pass(pair), plain.pass(pair)
		} else {
			p, o = plain.pass(pair), ours.pass(pair)
		}
		clear := func(dir string) { // its space is wanted for the next pass; what the index thinks does not matter here
			if err := removeFiles(dir); err != nil {
				b.Fatal(err)
			}
		}
		clear(ours.root)
		clear(plain.dir)
		if pair > 0 {
			stores = append(stores, p.store.Seconds()/o.store.Seconds())
			loads = append(loads, p.load.Seconds()/o.load.Seconds())
		}
	}
	report(b, "store", stores)
	report(b, "load", loads)
	gb := float64(benchFiles) * float64(geo.PageBytes()) / 1e9
	b.ReportMetric(gb/o.store.Seconds(), "store-GB/s")
	b.ReportMetric(gb/o.load.Seconds(), "load-GB/s")
	b.ReportMetric(o.storeCPU.Seconds()/gb, "store-cpu-s/GB")
	b.ReportMetric(p.storeCPU.Seconds()/gb, "plain-store-cpu-s/GB")
	b.ReportMetric(o.loadCPU.Seconds()/gb, "load-cpu-s/GB")
	b.ReportMetric(p.loadCPU.Seconds()/gb, "plain-load-cpu-s/GB")
}

func report(b *testing.B, what string, ratios []float64) {
	slices.Sort(ratios)
	n := len(ratios)
	b.ReportMetric(ratios[n/2], what+"-ratio")
	b.ReportMetric(ratios[n/4], what+"-q1")
	b.ReportMetric(ratios[3*n/4], what+"-q3")
}

// cpu is the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// removeFiles removes the files of finished passes and leaves directories and the store's own files.
func removeFiles(root string) error {
	return filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(path, "/.kvhost") {
			return err
		}
		return os.Remove(path)
	})
}

type ourPath struct {
	b         *testing.B
	root      string
	store     *store.Store
	engine    *transfer.Engine
	queue     *transfer.Queue
	space     *catalog.Namespace
	memory    *transfer.HostMemory
	mapped    [][]byte
	fileBytes int64
}

func newOurPath(b *testing.B, geo kv.Geometry, root string, change ...func(*store.Config)) *ourPath {
	p := &ourPath{b: b, root: root, fileBytes: 8192 + geo.PageBytes()} // header page, checksum table, payload
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	ctx := context.Background()
	var err error
	cfg := store.Config{Roots: []store.RootConfig{{Path: root, Capacity: 8 << 30}}}
	for _, c := range change {
		c(&cfg)
	}
	p.store, err = store.Open(ctx, cfg)
	must(err)
	p.engine, err = transfer.New(transfer.Config{
		Threads: benchThreads, SlotBytes: 4 << 20, MaxStaging: 2 * benchThreads * 4 << 20, ReadRatio: 0.75,
	})
	must(err)
	p.queue, err = p.engine.Queue("host")
	must(err)
	p.space, err = p.store.Namespace(ctx, &kv.Namespace{
		Model: "bench", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: geo}},
	})
	must(err)
	var regions []transfer.HostRegion
	for range geo.Planes {
		mem, err := unix.Mmap(-1, 0, benchFiles*64<<10, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
		must(err)
		p.mapped = append(p.mapped, mem)
		regions = append(regions, transfer.HostRegion{Data: mem, Stride: 64 << 10, Blocks: benchFiles})
	}
	p.memory, err = transfer.NewHostMemory(geo, regions)
	must(err)
	return p
}

func (p *ourPath) close() {
	if err := p.engine.Close(); err != nil {
		p.b.Fatal(err)
	}
	if err := p.store.Close(); err != nil {
		p.b.Fatal(err)
	}
	for _, m := range p.mapped {
		if err := unix.Munmap(m); err != nil {
			p.b.Fatal(err)
		}
	}
}

// keys of a pass: a chain that the default naming puts into one directory, as the plain loop's files are.
func (p *ourPath) keys(pass int) []kv.Key {
	keys := make([]kv.Key, benchFiles)
	for n := range keys {
		binary.BigEndian.PutUint64(keys[n][8:], uint64(pass*benchFiles+n)+1)
	}
	return keys
}

func (p *ourPath) pass(pass int) (t times) {
	keys, ctx := p.keys(pass), context.Background()
	done := make(chan transfer.Outcome, 1)
	await := func() {
		if o := <-done; len(o.Failed) > 0 {
			p.b.Fatal(o.Failed[0].Err)
		}
	}

	used, start := cpu(p.b), time.Now()
	job := &transfer.StoreJob{Memory: p.memory, Read: func(transfer.Outcome) {},
		Published: func(o transfer.Outcome) { done <- o }}
	parent := kv.Root
	for n, k := range keys {
		put, err := p.store.Put(ctx, store.PutRequest{Namespace: p.space, Parent: parent, Key: k, Depth: uint32(n),
			Ranks: 1})
		if err != nil || put.FileBytes() != p.fileBytes {
			p.b.Fatal("put", err)
		}
		job.Chunks = append(job.Chunks, transfer.StoreChunk{Put: put, Blocks: []uint32{uint32(n)}})
		parent = k
	}
	p.queue.Store(job)
	await()
	t.store, t.storeCPU = time.Since(start), cpu(p.b)-used

	used, start = cpu(p.b), time.Now()
	lease, err := p.store.Lookup(store.LookupRequest{Namespace: p.space, Keys: keys, Ranks: 1})
	if err != nil || lease.Hits() != benchFiles {
		p.b.Fatal("lookup", err)
	}
	load := &transfer.LoadJob{Lease: lease, Memory: p.memory, Done: func(o transfer.Outcome) { done <- o }}
	for n := range keys {
		load.Chunks = append(load.Chunks, transfer.LoadChunk{Index: n, Blocks: []uint32{uint32(benchFiles - 1 - n)}})
	}
	p.queue.Load(load)
	await()
	t.load, t.loadCPU = time.Since(start), cpu(p.b)-used
	lease.Release()
	return t
}

type plainLoop struct {
	b       *testing.B
	dir     string
	fs      staging.FS
	slots   *staging.Slots // the same kind of memory as ours
	buffers [][]byte
}

func newPlainLoop(b *testing.B, dir string, fileBytes int64) *plainLoop {
	p := &plainLoop{b: b, dir: dir, fs: staging.OS()}
	if err := os.Mkdir(dir, 0o700); err != nil {
		b.Fatal(err)
	}
	var err error
	if p.slots, err = staging.NewSlots(benchThreads, int(fileBytes)); err != nil {
		b.Fatal(err)
	}
	for range benchThreads {
		slot, err := p.slots.Acquire(context.Background())
		if err != nil {
			b.Fatal(err)
		}
		buf := slot.Bytes()
		for i := range buf {
			buf[i] = byte(i)
		}
		p.buffers = append(p.buffers, buf)
		b.Cleanup(slot.Release)
	}
	return p
}

// parallel runs one on every number of a pass, each thread taking the next.
func (p *plainLoop) parallel(one func(n int, buf []byte) error) (wall, used time.Duration) {
	before, start := cpu(p.b), time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, buf := range p.buffers {
		wg.Go(func() {
			for n := int(next.Add(1)) - 1; n < benchFiles; n = int(next.Add(1)) - 1 {
				if err := one(n, buf); err != nil {
					p.b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start), cpu(p.b) - before
}

func (p *plainLoop) pass(pass int) (t times) {
	name := func(n int) string { return filepath.Join(p.dir, fmt.Sprintf("%060x", pass*benchFiles+n)) }
	t.store, t.storeCPU = p.parallel(func(n int, buf []byte) error {
		f, err := staging.OpenDirect(p.fs, name(n)+".tmp", os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
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
	t.load, t.loadCPU = p.parallel(func(n int, buf []byte) error {
		f, err := staging.OpenDirect(p.fs, name(n), os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		if _, err := f.ReadAt(buf, 0); err != nil {
			return err
		}
		return f.Close()
	})
	return t
}
