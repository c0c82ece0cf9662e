package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// deviceRig is a store on real files, an engine, and pages on a GPU: the double, or with KVHOST_TEST_GPU set the
// first real one.
type deviceRig struct {
	t      testing.TB
	double *gdstest.Double
	gpu    *gds.GPU
	direct *gds.DirectRoute
	fs     *faultfs.FS
	root   string
	store  *store.Store
	space  *catalog.Namespace
	engine *Engine
	queue  *Queue
	memory *DeviceMemory
	planes []*gds.Buffer
	geo    kv.Geometry
	rng    *rand.Rand
	float  bool // pages hold what compresses
	dtype  string
}

const devicePoison = 0xa5

func newDeviceRig(
	t testing.TB, geo kv.Geometry, blocks uint32, bufferBytes int64, change ...func(*store.Config)) *deviceRig {
	t.Helper()
	return newDeviceRigOf(t, "bf16", geo, blocks, bufferBytes, change...)
}

// newDeviceRigOf is newDeviceRig for pages of a dtype. If the first root's pieces are compressed, the GPU has its codec.
func newDeviceRigOf(
	t testing.TB, dtype string, geo kv.Geometry, blocks uint32, bufferBytes int64, change ...func(*store.Config),
) *deviceRig {
	t.Helper()
	r := &deviceRig{t: t, dtype: dtype, geo: geo, fs: faultfs.New(staging.OS()), root: filepath.Join(t.TempDir(), "root"),
		rng: rand.New(rand.NewPCG(3, 4))}
	must := func(err error) {
		t.Helper()
		testenv.OK(t, err)
	}
	var names []string
	if os.Getenv("KVHOST_TEST_GPU") == "" {
		r.double = gdstest.Build(t)
		names = []string{r.double.Path}
	}
	d, err := gds.Open(nil, names...)
	must(err)
	devices, err := d.Devices()
	must(err)
	stored := store.Config{
		FS:    staging.OnRemove(r.fs, func(dev, ino uint64) { r.direct.Handles.Forget(dev, ino) }),
		Roots: []store.RootConfig{{Path: r.root, Capacity: 1 << 30}},
	}
	for _, c := range change {
		c(&stored)
	}
	r.gpu, err = d.OpenGPU(devices[0].UUID, gds.Config{Threads: 3, Files: 3, Blocks: 32, Window: MinSlotBytes,
		Codec: stored.Roots[0].Compressed})
	must(err)
	c, err := gds.LoadCuFile(names...)
	must(err)
	must(r.onFile(c.Open))
	r.direct, err = gds.NewDirectRoute(r.gpu, c, gds.DirectConfig{BufferBytes: bufferBytes, Handles: 4})
	must(err)
	r.store, err = store.Open(context.Background(), stored)
	must(err)
	r.space, err = r.store.Namespace(context.Background(), &kv.Namespace{
		Model: "test", DType: dtype, KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: geo}},
	})
	must(err)
	r.engine, err = New(Config{Threads: 4, SlotBytes: MinSlotBytes, MaxStaging: 4 * MinSlotBytes, ReadRatio: 0.75})
	must(err)
	must(r.engine.AddGPU(r.gpu))
	r.queue, err = r.engine.Queue("gpu")
	must(err)
	var regions []DeviceRegion
	for _, p := range geo.Planes {
		stride := int64(p.PageBytes) + 64 // pages do not touch: a copy that runs over is seen
		size := 32 + stride*int64(blocks)
		b, err := r.gpu.Alloc(size)
		must(err)
		r.planes = append(r.planes, b)
		regions = append(regions, DeviceRegion{Base: b.Address, Bytes: size, Grid: Grid{Offset: 32, Stride: stride, Blocks: blocks}})
	}
	r.memory, err = NewDeviceMemory(r.gpu, geo, regions)
	must(err)
	t.Cleanup(func() {
		if r.double != nil {
			r.double.Rules("")
		}
		r.fs.Set()
		for _, f := range []func() error{r.engine.Close, r.store.Close, r.direct.Close} {
			testenv.NoError(t, f())
		}
		if r.gpu.Err() == nil {
			testenv.NoError(t, r.onFile(c.Close))
		}
		testenv.NoError(t, r.gpu.Close())
		if r.double != nil {
			r.double.Forget()
		}
	})
	return r
}

// rules sets the double's. A real GPU has none.
func (r *deviceRig) rules(text string) {
	if r.double != nil {
		r.double.Rules(text)
	}
}

func (r *deviceRig) onFile(fn func(*gds.Thread) error) (err error) {
	if lost := r.gpu.DoFile(func(t *gds.Thread) { err = fn(t) }); lost != nil {
		return lost
	}
	return err
}

// on runs fn, again where a proxy before the real library has failed a call.
func (r *deviceRig) on(fn func(*gds.Thread) error) {
	r.t.Helper()
	var err error
	for range 10 {
		if lost := r.gpu.Do(func(t *gds.Thread) { err = fn(t) }); lost != nil {
			r.t.Fatal(lost, err)
		}
		if err == nil {
			return
		}
	}
	r.t.Fatal(err)
}

func (r *deviceRig) route(c RouteChoice) *gpuRoute {
	if c.Direct == nil {
		c.Direct = r.direct
	}
	r.engine.SetRoute(r.gpu, r.root, c)
	return r.engine.direct.chosen[routeKey{r.gpu, r.root}]
}

func deviceKey(n int) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	return k
}

// content makes what a page holds.
func (r *deviceRig) content(n, plane, block int) []byte {
	page := make([]byte, r.geo.Planes[plane].PageBytes)
	if r.float {
		dtype := payload.FP8
		if r.dtype == "bf16" {
			dtype = payload.BFloat16
		}
		content, err := payload.Of(dtype)
		testenv.OK(r.t, err)
		key := deviceKey(n)
		content.Fill(page, payload.Seed(&key, 0, r.geo.Planes[plane], uint32(block)))
		return page
	}
	testenv.Fill(page, uint64(n)<<32|uint64(plane)<<16|uint64(block))
	return page
}

func (r *deviceRig) address(plane int, id uint32) uint64 {
	return r.planes[plane].Address + 32 + uint64(id)*uint64(r.geo.Planes[plane].PageBytes+64)
}

func (r *deviceRig) poison() {
	for _, p := range r.planes {
		r.on(func(t *gds.Thread) error { return t.Fill(p.Address, devicePoison, p.Size) })
	}
}

// put fills the pages of chunk n and reserves its place.
func (r *deviceRig) put(n int, ids []uint32) StoreChunk {
	r.t.Helper()
	for plane := range r.geo.Planes {
		for i, id := range ids {
			r.on(func(t *gds.Thread) error { return t.Write(r.address(plane, id), r.content(n, plane, i)) })
		}
	}
	p, err := r.store.Put(context.Background(), store.PutRequest{Namespace: r.space, Key: deviceKey(n), Ranks: 1})
	if err != nil {
		r.t.Fatalf("put %d: %v", n, err)
	}
	return StoreChunk{Put: p, Blocks: ids}
}

func (r *deviceRig) storeAll(chunks ...StoreChunk) (read, published Outcome) {
	return r.storeFrom(r.queue, r.memory, chunks...)
}

// mustStore is storeAll where no chunk may fail.
func (r *deviceRig) mustStore(chunks ...StoreChunk) {
	r.t.Helper()
	if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
		r.t.Fatalf("stored %d chunks: %+v, %+v; want no failure", len(chunks), read.Failed, out.Failed)
	}
}

// storeFrom is storeAll from any memory.
func (r *deviceRig) storeFrom(q *Queue, m Memory, chunks ...StoreChunk) (read, published Outcome) {
	var wg sync.WaitGroup
	wg.Add(2)
	q.Store(&StoreJob{
		Memory: m, Chunks: chunks,
		Read:      func(o Outcome) { read = o; wg.Done() },
		Published: func(o Outcome) { published = o; wg.Done() },
	})
	wg.Wait()
	return read, published
}

// shuffled gives each of n chunks blocks of its own.
func (r *deviceRig) shuffled(n int) [][]uint32 {
	per := int(r.geo.Blocks)
	perm := r.rng.Perm(int(r.memory.Blocks()))
	out := make([][]uint32, n)
	for c := range out {
		for i := range per {
			out[c] = append(out[c], uint32(perm[c*per+i]))
		}
	}
	return out
}

// load brings chunks to blocks and gives their lookup's and the job's outcome.
func (r *deviceRig) load(chunks []int, ids [][]uint32) Outcome {
	r.t.Helper()
	return r.loadTo(r.queue, r.memory, chunks, ids, nil)
}

// mustLoad is load where no chunk may fail.
func (r *deviceRig) mustLoad(chunks []int, ids [][]uint32) {
	r.t.Helper()
	if out := r.load(chunks, ids); len(out.Failed) > 0 {
		r.t.Fatalf("loaded chunks %v: %+v, want no failure", chunks, out.Failed)
	}
}

// loadTo is load to any memory, whole or by layers.
func (r *deviceRig) loadTo(q *Queue, m Memory, chunks []int, ids [][]uint32, by *Layers) Outcome {
	r.t.Helper()
	job := &LoadJob{Memory: m, Layers: by}
	var keys []kv.Key
	for i, n := range chunks {
		keys = append(keys, deviceKey(n))
		job.Chunks = append(job.Chunks, LoadChunk{Index: i, Blocks: ids[i]})
	}
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: keys, Ranks: 1})
	if err != nil || l.Hits() != len(chunks) {
		r.t.Fatalf("%d hits of %d, %v", l.Hits(), len(chunks), err)
	}
	defer l.Release()
	job.Lease = l
	done := make(chan Outcome, 1)
	job.Done = func(o Outcome) { done <- o }
	q.Load(job)
	return <-done
}

// holds compares every page of a chunk; with poisonToo a byte may also be untouched.
func (r *deviceRig) holds(n int, ids []uint32, poisonToo bool) error {
	for plane := range r.geo.Planes {
		for i, id := range ids {
			want, got := r.content(n, plane, i), make([]byte, r.geo.Planes[plane].PageBytes)
			r.on(func(t *gds.Thread) error { return t.Read(got, r.address(plane, id)) })
			if poisonToo {
				for k := range got {
					if got[k] == devicePoison {
						got[k] = want[k]
					}
				}
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("chunk %d plane %d block %d (id %d) differs", n, plane, i, id)
			}
		}
	}
	return nil
}

// took counts the pieces that arrived, by the route that is booked for them.
func (r *deviceRig) took() map[string]int64 {
	out := map[string]int64{}
	for _, f := range r.engine.Traffic() {
		for _, m := range f.Routes {
			out[m.Route] += m.Files
		}
	}
	return out
}

func (r *deviceRig) stats() RouteStats { return r.engine.Routes()[0] }
