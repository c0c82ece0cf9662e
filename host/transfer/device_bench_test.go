package transfer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
)

// The staged route of a GPU beside its ceilings, in one run: stores and loads of whole chunks through store and engine,
// checksums made and verified; the copy kernel alone between pages and page-locked slots; and plain threads that write and
// rename, or read, files of the same size from and to page-locked slots. The passes of a round alternate in order, the
// first round is not counted, and a load is compared byte by byte in every round. With KVHOST_TEST_GPU set it runs on the
// first GPU and prints a row for each case; without, a small round on the double shows that it runs, and no figure is told.
//
// KVHOST_BENCH_DISK names the directory for the cases of the page cache and of O_DIRECT.
func BenchmarkDevicePath(b *testing.B) {
	real := os.Getenv("KVHOST_TEST_GPU") != ""
	size := deviceCase{chunks: 3, rounds: 1, threads: 2, slot: 1 << 20}
	shapes := []struct {
		name string
		geo  chunk.Geometry
	}{{"Llama-3.1-8B, 32 x 64 KiB pages", chunk.Uniform(16, 4, 1, 64<<10)}, {"MLA, 61 x 18,432 B pages", chunk.Uniform(16, 3, 1, 18432)}}
	if real {
		size = deviceCase{chunks: 96, rounds: setting("KVHOST_BENCH_ROUNDS", 7), threads: setting("KVHOST_BENCH_THREADS", 16), slot: setting("KVHOST_BENCH_SLOT", 4<<20)}
		shapes[0].geo, shapes[1].geo = chunk.Uniform(16, 32, 1, 64<<10), chunk.Uniform(16, 61, 1, 18432)
	}
	disk := os.Getenv("KVHOST_BENCH_DISK")
	if disk == "" {
		disk = b.TempDir()
	}
	for range b.N {
		for _, s := range shapes {
			for _, where := range []struct {
				name, dir string
				fs        staging.FS
			}{{"tmpfs", "/dev/shm", staging.OS()}, {"page cache", disk, staging.Buffered(staging.OS())}, {"disk, O_DIRECT", disk, staging.OS()}} {
				if only := os.Getenv("KVHOST_BENCH_ONLY"); only != "" && !strings.Contains(where.name, only) {
					continue
				}
				c := size
				c.geo, c.fs = s.geo, where.fs
				var err error
				if c.dir, err = os.MkdirTemp(where.dir, "kvhost-gpu-"); err != nil {
					b.Fatal(err)
				}
				rows := c.run(b)
				if err := os.RemoveAll(c.dir); err != nil {
					b.Fatal(err)
				}
				for _, row := range rows {
					if real {
						fmt.Printf("| %s | %s | %s |\n", s.name, where.name, row)
					}
				}
			}
		}
	}
}

func setting(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

type deviceCase struct {
	chunks, rounds, threads, slot int
	geo                           chunk.Geometry
	fs                            staging.FS
	dir                           string
}

// deviceRun is a case under way.
type deviceRun struct {
	deviceCase
	b      *testing.B
	gpu    *gds.GPU
	store  *store.Store
	space  *store.Space
	engine *transfer.Engine
	queue  *transfer.Queue
	memory *transfer.DeviceMemory
	planes []*gds.Buffer
	slots  *staging.Slots
	image  [][]byte // what the planes hold before they are stored
	seen   map[string]bool
	files  []string // of the last store
	rng    *rand.Rand
	size   int64 // of a file
}

func (c deviceCase) run(b *testing.B) []string {
	r := &deviceRun{deviceCase: c, b: b, seen: map[string]bool{}, rng: rand.New(rand.NewPCG(1, 1))}
	defer r.open()()
	type figures struct{ ours, kernel, files, cpu, plain []float64 }
	var stores, loads figures
	gb := float64(c.chunks) * float64(c.geo.PageBytes()) / 1e9
	for round := range c.rounds + 1 {
		perm, back := r.shuffle(), r.shuffle()
		for _, f := range []struct {
			to                  *figures
			ours, kernel, files func()
		}{
			{&stores, func() { r.storeAll(round, perm) }, func() { r.kernel(gds.Gather) }, func() { r.writeFiles(round) }},
			{&loads, func() { r.loadAll(round, back) }, func() { r.kernel(gds.Scatter) }, r.readFiles},
		} {
			passes := []struct {
				fn  func()
				to  *[]float64
				cpu *[]float64
			}{{f.ours, &f.to.ours, &f.to.cpu}, {f.kernel, &f.to.kernel, nil}, {f.files, &f.to.files, &f.to.plain}}
			if round%2 == 1 {
				slices.Reverse(passes)
			}
			for _, p := range passes {
				if p.to == &stores.ours {
					r.restore() // the kernel alone leaves anything
				}
				if p.to == &loads.ours {
					r.poison()
				}
				before, start := cpu(b), time.Now()
				p.fn()
				took, used := time.Since(start), cpu(b)-before
				if p.to == &stores.ours {
					r.remember()
				}
				if p.to == &loads.ours {
					r.compare(perm, back)
				}
				if round > 0 {
					*p.to = append(*p.to, gb/took.Seconds())
					if p.cpu != nil {
						*p.cpu = append(*p.cpu, used.Seconds()/gb)
					}
				}
			}
		}
		os.RemoveAll(filepath.Join(c.dir, "plain"))
	}
	row := func(what string, f *figures) string {
		ratios := make([]float64, len(f.ours))
		for i := range ratios {
			ratios[i] = f.ours[i] / min(f.kernel[i], f.files[i])
		}
		low, mid, high := quartiles(ratios)
		_, ours, _ := quartiles(f.ours)
		_, kernel, _ := quartiles(f.kernel)
		_, files, _ := quartiles(f.files)
		_, used, _ := quartiles(f.cpu)
		_, plain, _ := quartiles(f.plain)
		return fmt.Sprintf("%s | %.1f | %.1f | %.1f | %.2f (%.2f to %.2f) | %.3f / %.3f", what, kernel, files, ours, mid, low, high, used, plain)
	}
	return []string{row("store", &stores), row("load", &loads)}
}

func quartiles(list []float64) (low, mid, high float64) {
	s := slices.Sorted(slices.Values(list))
	n := len(s)
	return s[n/4], s[n/2], s[3*n/4]
}

func (r *deviceRun) open() (done func()) {
	b := r.b
	var names []string
	if os.Getenv("KVHOST_TEST_GPU") == "" {
		names = []string{gdstest.Build(b).Path}
	}
	must := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	d, err := gds.Open(nil, names...)
	must(err)
	devices, err := d.Devices()
	must(err)
	r.gpu, err = d.OpenGPU(devices[0].UUID, gds.Config{
		Threads: setting("KVHOST_BENCH_COPIES", 8), Blocks: setting("KVHOST_BENCH_BLOCKS", 32), Spin: os.Getenv("KVHOST_BENCH_SPIN") != "",
	})
	must(err)
	r.store, err = store.Open(context.Background(), store.Config{FS: r.fs, Roots: []store.RootConfig{{Path: filepath.Join(r.dir, "root"), Capacity: 200 << 30}}})
	must(err)
	r.space, err = r.store.Space(context.Background(), &chunk.Namespace{
		Model: "bench", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []chunk.Group{{Geometry: r.geo}},
	})
	must(err)
	staged := int64(max(2*r.threads*r.slot, 64<<20))
	r.engine, err = transfer.New(transfer.Config{Threads: r.threads, SlotBytes: r.slot, MaxStaging: staged, ReadRatio: 0.75, GPUWindow: setting("KVHOST_BENCH_WINDOW", 0)})
	must(err)
	must(r.engine.AddGPU(r.gpu))
	r.queue, err = r.engine.Queue("gpu")
	must(err)
	r.slots, err = staging.NewSlots(r.threads, r.slot)
	must(err)
	must(r.slots.Register(r.gpu.Pinner()))
	blocks := r.chunks * int(r.geo.Blocks)
	var regions []transfer.DeviceRegion
	for _, p := range r.geo.Planes {
		n := blocks * int(p.PageBytes)
		buf, err := r.gpu.Alloc(int64(n))
		must(err)
		r.planes = append(r.planes, buf)
		regions = append(regions, transfer.DeviceRegion{Base: buf.Address, Bytes: int64(n), Stride: int64(p.PageBytes), Blocks: uint32(blocks)})
		mem := make([]byte, n)
		seed := rand.NewPCG(uint64(len(r.planes)), 5)
		for i := 0; i+8 <= n; i += 8 {
			binary.LittleEndian.PutUint64(mem[i:], seed.Uint64())
		}
		r.image = append(r.image, mem)
	}
	r.memory, err = transfer.NewDeviceMemory(r.gpu, r.geo, regions)
	must(err)
	r.restore()
	return func() {
		must(r.engine.Close())
		must(r.slots.Close())
		must(r.store.Close())
		for _, p := range r.planes {
			must(p.Free())
		}
		must(r.gpu.Close())
	}
}

func (r *deviceRun) on(fn func(*gds.Thread) error) {
	var err error
	if e := r.gpu.Do(func(t *gds.Thread) { err = fn(t) }); e != nil || err != nil {
		r.b.Error(e, err)
	}
}

func (r *deviceRun) restore() {
	for i, p := range r.planes {
		r.on(func(t *gds.Thread) error { return t.Write(p.Address, r.image[i]) })
	}
}

func (r *deviceRun) poison() {
	for _, p := range r.planes {
		r.on(func(t *gds.Thread) error { return t.Fill(p.Address, poison, p.Size) })
	}
}

func (r *deviceRun) shuffle() [][]uint32 {
	per := int(r.geo.Blocks)
	perm := r.rng.Perm(r.chunks * per)
	out := make([][]uint32, r.chunks)
	for c := range out {
		for i := range per {
			out[c] = append(out[c], uint32(perm[c*per+i]))
		}
	}
	return out
}

func (r *deviceRun) key(round, n int) chunk.Key { return key(round*r.chunks + n) }

func (r *deviceRun) storeAll(round int, ids [][]uint32) {
	job := &transfer.StoreJob{Memory: r.memory, Read: func(transfer.Outcome) {}}
	for n := range r.chunks {
		parent := chunk.Root
		if n > 0 {
			parent = r.key(round, n-1)
		}
		p, err := r.store.Put(context.Background(), store.PutRequest{Space: r.space, Parent: parent, Key: r.key(round, n), Depth: uint32(n), Ranks: 1})
		if err != nil {
			r.b.Fatal(err)
		}
		r.size = p.FileBytes()
		job.Chunks = append(job.Chunks, transfer.StoreChunk{Put: p, Blocks: ids[n]})
	}
	done := make(chan transfer.Outcome, 1)
	job.Published = func(o transfer.Outcome) { done <- o }
	r.queue.Store(job)
	if o := <-done; len(o.Failed) > 0 {
		r.b.Fatal(o.Failed[0].Err)
	}
}

func (r *deviceRun) loadAll(round int, ids [][]uint32) {
	var keys []chunk.Key
	for n := range r.chunks {
		keys = append(keys, r.key(round, n))
	}
	l, err := r.store.Lookup(store.LookupRequest{Space: r.space, Keys: keys, Ranks: 1})
	if err != nil || l.Hits() != r.chunks {
		r.b.Fatal(l, err)
	}
	defer l.Release()
	job := &transfer.LoadJob{Lease: l, Memory: r.memory}
	for n := range r.chunks {
		job.Chunks = append(job.Chunks, transfer.LoadChunk{Index: n, Blocks: ids[n]})
	}
	done := make(chan transfer.Outcome, 1)
	job.Done = func(o transfer.Outcome) { done <- o }
	r.queue.Load(job)
	if o := <-done; len(o.Failed) > 0 {
		r.b.Fatal(o.Failed[0].Err)
	}
}

// compare holds every page on the GPU against what was stored from another block.
func (r *deviceRun) compare(from, to [][]uint32) {
	for plane, p := range r.planes {
		got := make([]byte, p.Size)
		r.on(func(t *gds.Thread) error { return t.Read(got, p.Address) })
		page := int(r.geo.Planes[plane].PageBytes)
		for c := range from {
			for i := range from[c] {
				f, t := int(from[c][i])*page, int(to[c][i])*page
				if !bytes.Equal(got[t:t+page], r.image[plane][f:f+page]) {
					r.b.Fatalf("plane %d, chunk %d, block %d differs", plane, c, i)
				}
			}
		}
	}
}

// kernel moves as many bytes between pages and slots as a pass does, and nothing else.
func (r *deviceRun) kernel(dir gds.Direction) {
	page := int(r.geo.Planes[0].PageBytes)
	per := r.slot / page
	total := int64(r.chunks) * r.geo.PageBytes() / int64(page)
	var next atomic.Int64
	var work sync.WaitGroup
	for range setting("KVHOST_BENCH_COPIES", 8) {
		work.Go(func() {
			slot, err := r.slots.Acquire(context.Background())
			if err != nil {
				r.b.Error(err)
				return
			}
			defer slot.Release()
			for first := next.Add(int64(per)) - int64(per); first < total; first = next.Add(int64(per)) - int64(per) {
				r.on(func(t *gds.Thread) error {
					batch := t.Begin(dir, slot.Bytes(), nil)
					for i := range min(int64(per), total-first) {
						n := first + i
						plane := r.planes[n%int64(len(r.planes))]
						at := uint64(n/int64(len(r.planes))*7919%(plane.Size/int64(page))) * uint64(page)
						if err := batch.Add(plane.Address+at, int(i)*page, page); err != nil {
							return err
						}
					}
					return batch.Wait()
				})
			}
		})
	}
	work.Wait()
}

// remember notes which piece files are new since it was last asked.
func (r *deviceRun) remember() {
	var files []string
	err := filepath.WalkDir(filepath.Join(r.dir, "root"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || r.seen[path] || strings.Contains(path, "/.kvhost/") {
			return err
		}
		r.seen[path] = true
		files = append(files, path)
		return nil
	})
	if err != nil {
		r.b.Fatal(err)
	}
	if len(files) > 0 {
		r.files = files
	}
}

// each runs fn for every number below n on as many threads as the engine has, each with a slot.
func (r *deviceRun) each(n int, fn func(i int, slot []byte) error) {
	var next atomic.Int64
	var work sync.WaitGroup
	for range r.threads {
		work.Go(func() {
			slot, err := r.slots.Acquire(context.Background())
			if err != nil {
				r.b.Error(err)
				return
			}
			defer slot.Release()
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := fn(int(i), slot.Bytes()); err != nil {
					r.b.Error(err)
					return
				}
			}
		})
	}
	work.Wait()
}

func (r *deviceRun) readFiles() {
	r.each(len(r.files), func(i int, slot []byte) error {
		f, err := staging.OpenDirect(r.fs, r.files[i], os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		for off := int64(0); err == nil && off < info.Size; off += int64(len(slot)) {
			_, err = f.ReadAt(slot[:min(int64(len(slot)), info.Size-off)], off)
		}
		return err
	})
}

func (r *deviceRun) writeFiles(round int) {
	dir := filepath.Join(r.dir, "plain")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		r.b.Fatal(err)
	}
	size := r.size
	if size == 0 { // the first round may begin here
		size = (r.geo.PageBytes() + 8191) &^ 4095
	}
	r.each(r.chunks, func(i int, slot []byte) error {
		name := filepath.Join(dir, fmt.Sprintf("%d-%d", round, i))
		f, err := staging.OpenDirect(r.fs, name+".tmp", os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		for off := int64(0); err == nil && off < size; off += int64(len(slot)) {
			_, err = f.WriteAt(slot[:min(int64(len(slot)), size-off)], off)
		}
		if err != nil {
			return err
		}
		return os.Rename(name+".tmp", name)
	})
}
