package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// deviceRig is a store on real files, an engine, and pages on a GPU: the double, or with KVHOST_TEST_GPU set the first real
// one.
type deviceRig struct {
	t      testing.TB
	double *gdstest.Double
	gpu    *gds.GPU
	direct *gds.DirectRoute
	fs     *staging.FaultFS
	root   string
	store  *store.Store
	space  *store.Space
	engine *Engine
	queue  *Queue
	memory *DeviceMemory
	planes []*gds.Buffer
	geo    chunk.Geometry
	rng    *rand.Rand
}

const devicePoison = 0xa5

func newDeviceRig(t testing.TB, geo chunk.Geometry, blocks uint32, bufferBytes int64) *deviceRig {
	t.Helper()
	r := &deviceRig{t: t, geo: geo, fs: staging.Faulty(staging.OS()), root: filepath.Join(t.TempDir(), "root"), rng: rand.New(rand.NewPCG(3, 4))}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
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
	r.gpu, err = d.OpenGPU(devices[0].UUID, gds.Config{Threads: 3, Files: 3, Blocks: 32})
	must(err)
	c, err := gds.LoadCuFile(names...)
	must(err)
	must(r.onFile(c.Open))
	r.direct, err = gds.NewDirectRoute(r.gpu, c, gds.DirectConfig{BufferBytes: bufferBytes, Handles: 4})
	must(err)
	r.store, err = store.Open(context.Background(), store.Config{
		FS: staging.OnRemove(r.fs, func(dev, ino uint64) { r.direct.Handles.Forget(dev, ino) }), Roots: []store.RootConfig{{Path: r.root, Capacity: 1 << 30}},
	})
	must(err)
	r.space, err = r.store.Space(context.Background(), &chunk.Namespace{
		Model: "test", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []chunk.Group{{Geometry: geo}},
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
		regions = append(regions, DeviceRegion{Base: b.Address, Bytes: size, Offset: 32, Stride: stride, Blocks: blocks})
	}
	r.memory, err = NewDeviceMemory(r.gpu, geo, regions)
	must(err)
	t.Cleanup(func() {
		if r.double != nil {
			r.double.Rules("")
		}
		r.fs.Set()
		for _, f := range []func() error{r.engine.Close, r.store.Close, r.direct.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
		if r.gpu.Err() == nil {
			if err := r.onFile(c.Close); err != nil {
				t.Error(err)
			}
		}
		if err := r.gpu.Close(); err != nil {
			t.Error(err)
		}
		if r.double != nil {
			r.double.Forget()
		}
	})
	return r
}

func (r *deviceRig) onFile(fn func(*gds.Thread) error) (err error) {
	if lost := r.gpu.DoFile(func(t *gds.Thread) { err = fn(t) }); lost != nil {
		return lost
	}
	return err
}

func (r *deviceRig) on(fn func(*gds.Thread) error) {
	r.t.Helper()
	var err error
	if lost := r.gpu.Do(func(t *gds.Thread) { err = fn(t) }); lost != nil || err != nil {
		r.t.Fatal(lost, err)
	}
}

func (r *deviceRig) route(c RouteChoice) *route {
	if c.Direct == nil {
		c.Direct = r.direct
	}
	r.engine.SetRoute(r.gpu, r.root, c)
	return r.engine.routes[routeKey{r.gpu, r.root}]
}

func deviceKey(n int) (k chunk.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	return k
}

func (r *deviceRig) content(n, plane, block int) []byte {
	page := make([]byte, r.geo.Planes[plane].PageBytes)
	seed := rand.NewPCG(uint64(n)<<32|uint64(plane)<<16|uint64(block), 9)
	for i := range page {
		if i%8 == 0 {
			var w [8]byte
			binary.LittleEndian.PutUint64(w[:], seed.Uint64())
			copy(page[i:], w[:])
		}
	}
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
	p, err := r.store.Put(context.Background(), store.PutRequest{Space: r.space, Key: deviceKey(n), Ranks: 1})
	if err != nil {
		r.t.Fatalf("put %d: %v", n, err)
	}
	return StoreChunk{Put: p, Blocks: ids}
}

func (r *deviceRig) storeAll(chunks ...StoreChunk) (read, published Outcome) {
	var wg sync.WaitGroup
	wg.Add(2)
	r.queue.Store(&StoreJob{
		Memory: r.memory, Chunks: chunks,
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
	job := &LoadJob{Memory: r.memory}
	var keys []chunk.Key
	for i, n := range chunks {
		keys = append(keys, deviceKey(n))
		job.Chunks = append(job.Chunks, LoadChunk{Index: i, Blocks: ids[i]})
	}
	l, err := r.store.Lookup(store.LookupRequest{Space: r.space, Keys: keys, Ranks: 1})
	if err != nil || l.Hits() != len(chunks) {
		r.t.Fatalf("%d hits of %d, %v", l.Hits(), len(chunks), err)
	}
	defer l.Release()
	job.Lease = l
	done := make(chan Outcome, 1)
	job.Done = func(o Outcome) { done <- o }
	r.queue.Load(job)
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

func (r *deviceRig) stats() RouteStats { return r.engine.Routes()[0] }

var deviceShapes = map[string]chunk.Geometry{
	"small pages":     chunk.Uniform(4, 3, 2, 4096),
	"odd pages":       chunk.Uniform(3, 2, 1, 5000),
	"tiny pages":      chunk.Uniform(2, 2, 1, 16),
	"larger than one": chunk.Uniform(4, 4, 1, 100_000),
	"many windows":    chunk.Uniform(3, 9, 1, 300_000),
}

func TestDirectStoresAndLoads(t *testing.T) {
	for name, geo := range deviceShapes {
		for _, submit := range []gds.Submit{gds.Sync, gds.Async} {
			t.Run(name+" "+submit.String(), func(t *testing.T) {
				r := newDeviceRig(t, geo, 64, 32<<20)
				r.route(RouteChoice{Submit: submit})
				const n = 5
				var chunks []StoreChunk
				from := r.shuffled(n)
				for c := range n {
					chunks = append(chunks, r.put(c, from[c]))
				}
				if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
					t.Fatal(read, out)
				}
				check := func(what string) {
					t.Helper()
					r.poison()
					ids := r.shuffled(n)
					if out := r.load([]int{0, 1, 2, 3, 4}, ids); len(out.Failed) > 0 {
						t.Fatal(what, out.Failed)
					}
					for c := range n {
						if err := r.holds(c, ids[c], false); err != nil {
							t.Error(what, err)
						}
					}
				}
				check("direct")
				if s := r.stats(); s.Stores != n || s.Loads != n || s.Route != "direct" || s.SlotsInUse != 0 || s.Handles.Hits == 0 {
					t.Errorf("%+v", s)
				}
				r.engine.SetRoute(r.gpu, r.root, RouteChoice{}) // what went direct is an ordinary file
				check("staged")
				if s := r.stats(); s.Loads != 0 || s.Route != "staged" {
					t.Errorf("%+v", s)
				}
			})
		}
	}
}

// TestDirectFaultsAreStaged: whatever cuFile does wrong, the bytes arrive, and the counters say how.
func TestDirectFaultsAreStaged(t *testing.T) {
	for _, c := range []struct {
		name, store, load string // rules
		submit            gds.Submit
	}{
		{name: "registration", store: "cuFileHandleRegister:code=5027", load: "cuFileHandleRegister:code=5027"},
		{name: "internal", store: "cuFileWrite:code=5030", load: "cuFileRead:code=5030"},
		{name: "EIO", store: "cuFileWrite:errno=5", load: "cuFileRead:errno=5"},
		{name: "code as errno", store: "cuFileWrite:errno=5030", load: "cuFileRead:errno=5030"},
		{name: "short", store: "cuFileWrite:short=8192", load: "cuFileRead:short=8192"},
		{name: "nothing", store: "cuFileWrite:short=0", load: "cuFileRead:short=0"},
		{name: "negative count", store: "cuFileWrite:code=5030", load: "cuFileRead:errno=5", submit: gds.Async},
		{name: "async refused", store: "cuFileWriteAsync:code=5038", load: "cuFileReadAsync:code=5011:errno=2", submit: gds.Async},
		{name: "checksums", store: "sums:code=701", load: "sums:code=701"},
		{name: "no slot", store: "cuMemAlloc_v2:code=2", load: "cuMemAlloc_v2:code=2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			r := newDeviceRig(t, chunk.Uniform(4, 4, 1, 100_000), 64, 32<<20)
			r.route(RouteChoice{Submit: c.submit, Always: true})
			from := r.shuffled(3)
			chunks := []StoreChunk{r.put(0, from[0]), r.put(1, from[1]), r.put(2, from[2])}
			r.double.Rules(c.store)
			if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
				t.Fatal(read, out)
			}
			r.double.Rules(c.load)
			r.direct.Handles.Close() // so that the files are registered again
			r.direct.Handles = gds.NewHandles(r.gpu, r.direct.CuFile(), 4)
			ids := r.shuffled(3)
			r.double.Rules("")
			r.poison()
			r.double.Rules(c.load)
			if out := r.load([]int{0, 1, 2}, ids); len(out.Failed) > 0 {
				t.Fatal(out.Failed)
			}
			r.double.Rules("")
			for n := range 3 {
				if err := r.holds(n, ids[n], false); err != nil {
					t.Error(err)
				}
			}
			s := r.stats()
			if c.name == "no slot" {
				if s.Full != 6 || s.StoresAgain+s.LoadsAgain != 0 {
					t.Errorf("%+v", s)
				}
			} else if s.StoresAgain != 3 || s.LoadsAgain != 3 || s.Stores+s.Loads != 0 {
				t.Errorf("%+v", s)
			}
			if s.SlotsInUse != 0 || r.engine.Stats().SlotsInUse != 0 {
				t.Errorf("slots are held: %+v", s)
			}
		})
	}
}

// TestRouteIsLeftAndTakenUpAgain walks a route through failures, trials and recovery.
func TestRouteIsLeftAndTakenUpAgain(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, chunk.Uniform(2, 2, 1, 4096), 16, 8<<20)
	way := r.route(RouteChoice{})
	now := time.Unix(1000, 0)
	way.now = func() time.Time { return now }
	ids := r.shuffled(1)
	if _, out := r.storeAll(r.put(0, ids[0])); len(out.Failed) > 0 {
		t.Fatal(out)
	}
	load := func(rules string) {
		t.Helper()
		r.double.Rules("")
		r.poison()
		r.double.Rules(rules)
		if out := r.load([]int{0}, ids); len(out.Failed) > 0 {
			t.Fatal(out.Failed)
		}
		r.double.Rules("")
		if err := r.holds(0, ids[0], false); err != nil {
			t.Fatal(err)
		}
	}
	const broken = "cuFileRead:code=5030"
	load(broken)
	load("") // not three in a row
	load(broken)
	load(broken)
	if s := r.stats(); s.Left != 0 || s.Route != "direct" || s.LoadsAgain != 3 {
		t.Fatalf("%+v", s)
	}
	load(broken)
	load(broken) // not tried
	if s := r.stats(); s.Left != 1 || s.Route != "staged" || s.LoadsAgain != 4 {
		t.Fatalf("%+v", s)
	}
	now = now.Add(firstLeave)
	load(broken) // a trial
	load(broken)
	if s := r.stats(); s.Left != 2 || s.LoadsAgain != 5 {
		t.Fatalf("%+v", s)
	}
	now = now.Add(firstLeave)
	load("") // twice as long now
	if s := r.stats(); s.Returned != 0 || s.Loads != 1 {
		t.Fatalf("%+v", s)
	}
	now = now.Add(firstLeave)
	load("")
	if s := r.stats(); s.Returned != 1 || s.Loads != 2 || s.Route != "direct" {
		t.Fatalf("%+v", s)
	}
}

// TestDirectLiesAreFoundOut: bytes that are wrong by the direct route alone are staged, and the route is left at once; a
// file that is damaged is damaged by either.
func TestDirectLiesAreFoundOut(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, chunk.Uniform(4, 4, 1, 100_000), 64, 32<<20)
	r.route(RouteChoice{})
	from := r.shuffled(2)
	if _, out := r.storeAll(r.put(0, from[0]), r.put(1, from[1])); len(out.Failed) > 0 {
		t.Fatal(out)
	}
	ids := r.shuffled(2)
	r.poison()
	r.double.Rules("cuFileRead:flip=500000")
	if out := r.load([]int{0}, ids[:1]); len(out.Failed) > 0 {
		t.Fatal(out.Failed)
	}
	r.double.Rules("")
	if err := r.holds(0, ids[0], false); err != nil {
		t.Error(err)
	}
	if s := r.stats(); s.Mismatched != 1 || s.Left != 1 || s.Route != "staged" || s.Loads != 0 {
		t.Errorf("%+v", s)
	}
	r.route(RouteChoice{})
	var damaged string
	if err := filepath.WalkDir(r.root, func(path string, d os.DirEntry, err error) error {
		if err == nil && strings.Contains(path, deviceKey(1).String()) && d.Type().IsRegular() {
			damaged = path
		}
		return err
	}); err != nil || damaged == "" {
		t.Fatal(damaged, err)
	}
	f, err := os.OpenFile(damaged, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{1, 2, 3}, 700_001); err != nil {
		t.Fatal(err)
	}
	f.Close()
	r.poison()
	out := r.load([]int{0, 1}, ids)
	if len(out.Failed) != 1 || out.Failed[0].Chunk != 1 || !errors.Is(out.Failed[0].Err, chunk.ErrChecksum) {
		t.Fatal(out)
	}
	if err := errors.Join(r.holds(0, ids[0], false), r.holds(1, ids[1], true)); err != nil {
		t.Error(err)
	}
	if s := r.stats(); s.Mismatched != 0 || s.Left != 0 || s.Route != "direct" {
		t.Errorf("a damaged file is blamed on the route: %+v", s)
	}
}

// TestCancelNeedsNoCuFile: cuFile hangs under a load; the cancel completes it all the same, and what comes late goes
// nowhere. A store whose pages were read completes its first half while cuFile hangs.
func TestCancelNeedsNoCuFile(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, chunk.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	from := r.shuffled(2)
	first := r.put(0, from[0])
	r.double.Rules("cuFileWrite:hang")
	read, published := make(chan Outcome, 1), make(chan Outcome, 1)
	r.queue.Store(&StoreJob{Memory: r.memory, Chunks: []StoreChunk{first}, Read: func(o Outcome) { read <- o }, Published: func(o Outcome) { published <- o }})
	if o := <-read; len(o.Failed) > 0 {
		t.Fatal(o)
	}
	r.double.Rules("")
	if o := <-published; len(o.Failed) > 0 {
		t.Fatal(o)
	}
	r.poison()
	l, err := r.store.Lookup(store.LookupRequest{Space: r.space, Keys: []chunk.Key{deviceKey(0)}, Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(err)
	}
	defer l.Release()
	done := make(chan Outcome, 2)
	r.double.Rules("cuFileRead:hang")
	h := r.queue.Load(&LoadJob{Lease: l, Memory: r.memory, Chunks: []LoadChunk{{Blocks: from[1]}}, Done: func(o Outcome) { done <- o }})
	for r.double.Calls("cuFileRead") == 0 {
		time.Sleep(time.Millisecond)
	}
	h.Cancel()
	<-h.Fenced()
	if o := <-done; len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, ErrCancelled) {
		t.Errorf("%+v", o)
	}
	r.double.Rules("")
	if err := r.engine.Close(); err != nil { // waits for the late read
		t.Fatal(err)
	}
	for plane, p := range r.planes {
		got := make([]byte, p.Size)
		r.on(func(t *gds.Thread) error { return t.Read(got, p.Address) })
		if i := bytes.IndexFunc(got, func(c rune) bool { return c != 0xfffd }); i >= 0 && got[i] != devicePoison {
			t.Errorf("plane %d was touched after the fence", plane)
		}
	}
}

// TestLostGPUOnTheDirectRoute: a sticky error fails what needs the GPU, and blames no file.
func TestLostGPUOnTheDirectRoute(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, chunk.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	from := r.shuffled(2)
	if _, out := r.storeAll(r.put(0, from[0])); len(out.Failed) > 0 {
		t.Fatal(out)
	}
	last := r.put(1, from[1])
	r.double.Rules("sums:code=719")
	if out := r.load([]int{0}, from); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrDevice) {
		t.Fatal(out)
	}
	if _, out := r.storeAll(last); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrDevice) {
		t.Fatal(out)
	}
	l, err := r.store.Lookup(store.LookupRequest{Space: r.space, Keys: []chunk.Key{deviceKey(0)}, Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Error("the file was blamed", err)
	}
	l.Release()
}

// TestStagedWindows takes files of many windows the staged way, each window copied while the next one is read or
// written: whole, with too few slots to overlap, and with a disk that fails on the way.
func TestStagedWindows(t *testing.T) {
	r := newDeviceRig(t, deviceShapes["many windows"], 64, 8<<20)
	const n = 4
	var chunks []StoreChunk
	for c, ids := range r.shuffled(n) {
		chunks = append(chunks, r.put(c, ids))
	}
	if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
		t.Fatal(read, out)
	}
	r.poison()
	ids := r.shuffled(n)
	if out := r.load([]int{0, 1, 2, 3}, ids); len(out.Failed) > 0 {
		t.Fatal(out.Failed)
	}
	for c := range n {
		if err := r.holds(c, ids[c], false); err != nil {
			t.Error(err)
		}
	}
	if in := r.engine.Stats().SlotsInUse; in != 0 {
		t.Errorf("%d slots are held", in)
	}
	ids = r.shuffled(n)
	r.poison()
	r.fs.Set(staging.MustRules("read **" + deviceKey(2).String() + "** 4th: eio")...)
	out := r.load([]int{0, 1, 2, 3}, ids)
	r.fs.Set()
	if len(out.Failed) != 1 || out.Failed[0].Chunk != 2 {
		t.Fatal(out.Failed)
	}
	for c := range n {
		if err := r.holds(c, ids[c], c == 2); err != nil {
			t.Error(err)
		}
	}
	last := r.put(5, ids[0])
	r.fs.Set(staging.MustRules("write ** 4th: enospc")...)
	if _, out := r.storeAll(last); len(out.Failed) != 1 {
		t.Errorf("%+v", out)
	}
	r.fs.Set()
	if in := r.engine.Stats().SlotsInUse; in != 0 {
		t.Errorf("%d slots are held", in)
	}
}
