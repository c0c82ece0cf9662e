package transfer

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// routeRig is a rig where pieces take one route.
type routeRig struct {
	*deviceRig
	route, layered string                         // which pieces are to take: loaded whole, and by layers
	breakStores    string                         // the operation that fails with them
	change         func(n int, at int64, by byte) // changes one byte of chunk n's piece

	from  Memory
	queue *Queue
	host  func(plane int, id uint32) []byte // the page, if pages are in host memory
}

// everyRoute runs a test on each route, with and without the codec, and with pages of each kind that takes it.
func everyRoute(t *testing.T, test func(t *testing.T, r *routeRig)) {
	geo := kv.Uniform(4, 4, 1, 100_000) // larger than a slot, and pages that are not aligned
	const blocks = 28
	inMemory := func(t *testing.T) *routeRig {
		r, mem := newMemoryRig(t, geo, blocks)
		out := &routeRig{deviceRig: r, route: "memory", layered: "memory", breakStores: "allocate"}
		out.change = func(n int, at int64, by byte) { r.memoryFile(mem, n).From(at)[0] ^= by }
		return out
	}
	coded := func(t *testing.T) *routeRig { // holes leave extents that cross from one segment to the next
		r, mem := newMemoryRig(t, geo, blocks, compressed)
		Fragment(t, mem, 9)
		r.float = true
		out := &routeRig{deviceRig: r, route: "memory", layered: "memory", breakStores: "allocate"}
		out.change = func(n int, at int64, by byte) { r.memoryFile(mem, n).From(at)[0] ^= by }
		return out
	}
	noCodec := func(t *testing.T) *routeRig {
		r := coded(t)
		r.disableCodec()
		r.route, r.layered, r.breakStores = "staged", "staged", "write"
		return r
	}
	onFile := func(route string, compressed bool) func(t *testing.T) *routeRig {
		return func(t *testing.T) *routeRig {
			var r *deviceRig
			if compressed {
				r = newCompressedRig(t, "bf16", geo, blocks)
			} else {
				r = newDeviceRig(t, geo, blocks, 32<<20)
			}
			if route == "direct" {
				r.route(RouteChoice{})
			}
			out := &routeRig{deviceRig: r, route: route, layered: "staged", breakStores: "write"}
			out.change = func(n int, at int64, by byte) { ChangeByte(t, r.path(n), at, by) }
			return out
		}
	}
	byProcessor := func(make func(t *testing.T) *routeRig) func(t *testing.T) *routeRig {
		return func(t *testing.T) *routeRig {
			r := make(t)
			r.disableCodec()
			return r
		}
	}
	inHost := func(make func(t *testing.T) *routeRig) func(t *testing.T) *routeRig {
		return func(t *testing.T) *routeRig {
			r := make(t)
			r.from, r.queue, r.host = r.hostMemory()
			return r
		}
	}
	for name, make := range map[string]func(t *testing.T) *routeRig{
		"memory":                            inMemory,
		"memory, host pages":                inHost(inMemory),
		"memory, compressed":                coded,
		"memory, compressed on a processor": noCodec,
		"direct":                            onFile("direct", false),
		"direct, compressed":                onFile("direct", true),
		"staged":                            onFile("staged", false),
		"staged, host pages":                inHost(onFile("staged", false)),
		"staged, compressed":                onFile("staged", true),
		"staged, compressed on a processor": byProcessor(onFile("staged", true)),
		"staged, compressed, host pages":    inHost(onFile("staged", true)),
	} {
		t.Run(name, func(t *testing.T) {
			r := make(t)
			if r.host == nil {
				r.from, r.queue = r.memory, r.deviceRig.queue
			}
			test(t, r)
		})
	}
}

// ChangeByte changes one byte of a file.
func ChangeByte(t testing.TB, path string, at int64, by byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	testenv.OK(t, err)
	defer f.Close()
	var one [1]byte
	if _, err := f.ReadAt(one[:], at); err != nil {
		t.Fatal(err)
	}
	one[0] ^= by
	if _, err := f.WriteAt(one[:], at); err != nil {
		t.Fatal(err)
	}
}

// put fills the pages of chunk n, wherever they are, and reserves its place.
func (r *routeRig) put(n int, ids []uint32) StoreChunk {
	r.t.Helper()
	if r.host != nil {
		for plane := range r.geo.Planes {
			for i, id := range ids {
				copy(r.host(plane, id), r.content(n, plane, i))
			}
		}
	}
	return r.deviceRig.put(n, ids)
}

func (r *routeRig) poison() {
	r.deviceRig.poison()
	if r.host == nil {
		return
	}
	for plane := range r.geo.Planes {
		for id := range r.memory.Blocks() {
			page := r.host(plane, id)
			for i := range page {
				page[i] = devicePoison
			}
		}
	}
}

// store stores chunks 0 to n-1 from shuffled blocks, and poisons all pages.
func (r *routeRig) store(n int) {
	r.t.Helper()
	var chunks []StoreChunk
	for c, ids := range r.shuffled(n) {
		chunks = append(chunks, r.put(c, ids))
	}
	if read, out := r.storeFrom(r.queue, r.from, chunks...); len(read.Failed)+len(out.Failed) > 0 {
		r.t.Fatalf("stored %d chunks: %+v, %+v; want no failure", n, read.Failed, out.Failed)
	}
	r.poison()
}

// plane is all memory of a plane, and where page id begins in it.
func (r *routeRig) plane(plane int) (all []byte, page func(id uint32) int) {
	bytes := int(r.geo.Planes[plane].PageBytes)
	if r.host != nil {
		for id := range r.memory.Blocks() {
			all = append(all, r.host(plane, id)...)
		}
		return all, func(id uint32) int { return int(id) * bytes }
	}
	all = make([]byte, r.planes[plane].Size)
	r.on(func(t *gds.Thread) error { return t.Read(all, r.planes[plane].Address) })
	return all, func(id uint32) int { return 32 + int(id)*(bytes+64) }
}

// hold checks all memory of the pages: each chunk's blocks hold its content, those of partial chunks content or poison, and
// the rest is poison.
func (r *routeRig) hold(chunks map[int][]uint32, partial map[int][]uint32) {
	r.t.Helper()
	for plane := range r.geo.Planes {
		got, page := r.plane(plane)
		want := bytes.Repeat([]byte{devicePoison}, len(got))
		place := func(n int, ids []uint32, put func(at int, content []byte)) {
			for i, id := range ids {
				if id != abi.None {
					put(page(id), r.content(n, plane, i))
				}
			}
		}
		for n, ids := range chunks {
			place(n, ids, func(at int, content []byte) { copy(want[at:], content) })
		}
		for n, ids := range partial {
			place(n, ids, func(at int, content []byte) {
				for i, b := range content {
					if got[at+i] == b {
						want[at+i] = b
					}
				}
			})
		}
		if !bytes.Equal(got, want) {
			at := 0
			for got[at] == want[at] {
				at++
			}
			r.t.Errorf("plane %d: byte %d of %d is %#x, want %#x", plane, at, len(got), got[at], want[at])
		}
	}
}

// moved is what the routes have moved in a direction, and what failed on them.
func (r *routeRig) moved(kind staging.Kind) (files, failed map[string]int64, bytes int64) {
	files, failed = map[string]int64{}, map[string]int64{}
	for _, path := range r.engine.Traffic() {
		if path.Kind != kind {
			continue
		}
		if path.InFlight != 0 {
			r.t.Errorf("%d pieces are in flight after the job's end, want none", path.InFlight)
		}
		for _, m := range path.Routes {
			bytes += m.Bytes
			timed := int64(0)
			for _, n := range m.Buckets {
				timed += n
			}
			if timed != m.Files || (m.Took > 0) != (m.Files > 0) {
				r.t.Errorf("%d of %d pieces have a time, of %s together", timed, m.Files, m.Took)
			}
			if m.Files > 0 {
				files[m.Route] += m.Files
			}
			if m.Errors > 0 {
				failed[m.Route] += m.Errors
			}
		}
	}
	return files, failed, bytes
}

func (r *routeRig) wantMoved(kind staging.Kind, files, failed map[string]int64) {
	r.t.Helper()
	gotFiles, gotFailed, _ := r.moved(kind)
	if !maps.Equal(gotFiles, files) || !maps.Equal(gotFailed, failed) {
		r.t.Errorf("kind %v: %v moved and %v failed, want %v and %v", kind, gotFiles, gotFailed, files, failed)
	}
}

// idle checks that no slot is held.
func (r *routeRig) idle() {
	r.t.Helper()
	if n := r.engine.Stats().SlotsInUse; n != 0 {
		r.t.Errorf("%d staging slots are in use, want none", n)
	}
	for _, s := range r.engine.Routes() {
		if s.SlotsInUse != 0 {
			r.t.Errorf("%d slots of the direct route are in use, want none", s.SlotsInUse)
		}
	}
}

// routeBy is the route of loads, whole or by layers.
func (r *routeRig) routeBy(layers *Layers) string {
	if layers != nil {
		return r.layered
	}
	return r.route
}

// Chunks go out from shuffled blocks and come back to others: each byte is right, none beyond the blocks that are wanted is
// touched, and pieces, bytes and errors are counted on the route that was taken.
func TestEveryRouteMovesPieces(t *testing.T) {
	testenv.Slow(t)
	everyRoute(t, func(t *testing.T, r *routeRig) {
		const n = 3
		r.store(n)
		r.wantMoved(staging.Write, map[string]int64{r.route: n}, nil)
		loaded := map[string]int64{}
		for _, by := range []*Layers{nil, {}} {
			r.poison()
			ids := r.shuffled(n)
			ids[1][2], ids[2][0] = abi.None, abi.None
			if out := r.loadTo(r.queue, r.from, []int{0, 1, 2}, ids, by); len(out.Failed) > 0 ||
				out.Bytes != n*r.geo.PageBytes() {
				t.Fatalf("loaded %d bytes, %+v failed; want %d and none", out.Bytes, out.Failed, n*r.geo.PageBytes())
			}
			r.hold(map[int][]uint32{0: ids[0], 1: ids[1], 2: ids[2]}, nil)
			loaded[r.routeBy(by)] += n
			r.wantMoved(staging.Read, loaded, nil)
		}
		s := r.engine.Stats()
		_, _, stored := r.moved(staging.Write)
		_, _, read := r.moved(staging.Read)
		if s.StoredFiles != n || s.LoadedFiles != 2*n || s.StoredBytes != stored || s.LoadedBytes != read || read != 2*stored ||
			s.StoreErrors+s.LoadErrors != 0 {
			t.Errorf("counted %+v, want %d files of %d bytes stored and twice as many loaded", s, n, stored)
		}
		if r.route == "direct" {
			if d := r.stats(); d.Stores != n || d.Loads != n || d.Bytes != 2*stored ||
				d.StoreFallbacks+d.LoadFallbacks+d.Full+d.Mismatched+d.Suspended != 0 {
				t.Errorf("the direct route counted %+v, want %d stores, %d loads and %d bytes", d, n, n, 2*stored)
			}
		}
		r.idle()
	})
}

// A byte of a piece that changed fails its chunk alone, as damage of the file and not of the route, whatever the byte is of:
// header, table, or payload. The chunk is not promised again.
func TestEveryRouteFindsDamage(t *testing.T) {
	testenv.Slow(t)
	everyRoute(t, func(t *testing.T, r *routeRig) {
		const header, table, payload = 100, 4096 + 8, 8192 + 40_000
		parts := []int64{header, table, payload}
		r.store(1 + 2*len(parts)) // one that is sound
		for n := range 2 * len(parts) {
			r.change(1+n, parts[n%len(parts)], 0x10)
		}
		loaded, failed := map[string]int64{}, map[string]int64{}
		for pass, by := range []*Layers{nil, {}} {
			chunks, ids := []int{0}, r.shuffled(1+len(parts))
			damaged := map[int][]uint32{}
			for i := range parts {
				chunks = append(chunks, 1+pass*len(parts)+i)
				damaged[chunks[1+i]] = ids[1+i]
			}
			r.poison()
			out := r.loadTo(r.queue, r.from, chunks, ids, by)
			for _, f := range out.Failed {
				if f.Chunk == 0 || !errors.Is(f.Err, ErrDamaged) && !errors.Is(f.Err, kv.ErrChecksum) {
					t.Errorf("chunk %d failed with %v, want those that changed to fail for their bytes", f.Chunk, f.Err)
				}
			}
			if len(out.Failed) != len(parts) {
				t.Fatalf("failed: %+v, want the %d chunks that changed", out.Failed, len(parts))
			}
			r.hold(map[int][]uint32{0: ids[0]}, damaged)
			for i, n := range chunks {
				if hits, want := r.hits(n), map[bool]int{true: 1}[i == 0]; hits != want {
					t.Errorf("chunk %d has %d hits, want %d", n, hits, want)
				}
			}
			loaded[r.routeBy(by)]++
			failed["staged"] += 2 // the route that has the last word
			if r.route == "memory" {
				failed["memory"]++ // where the head says that it is memory
			} else {
				failed["staged"]++
			}
			r.wantMoved(staging.Read, loaded, failed)
		}
		if q := r.deviceRig.store.Stats().Roots[0].Quarantined; q != uint64(2*len(parts)) {
			t.Errorf("%d files in quarantine, want %d", q, 2*len(parts))
		}
		if r.route == "direct" {
			if d := r.stats(); d.Mismatched+d.Suspended+d.LoadFallbacks != 0 || d.Route != "direct" {
				t.Errorf("the direct route counted %+v, want no fault of its own", d)
			}
		}
		r.idle()
	})
}

// Memory of another shape is refused in both directions: nothing is written to it, and no piece is dropped for it.
func TestEveryRouteRefusesOtherShapes(t *testing.T) {
	testenv.Slow(t)
	everyRoute(t, func(t *testing.T, r *routeRig) {
		r.store(1)
		other := r.otherShape()
		for _, by := range []*Layers{nil, {}} {
			out := r.loadTo(r.queue, other, []int{0}, [][]uint32{{0, 1, 2, 3}}, by)
			if len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrGeometry) {
				t.Errorf("a load failed with %+v, want %v", out.Failed, ErrGeometry)
			}
		}
		r.hold(nil, nil)
		if r.hits(0) != 1 {
			t.Error("the piece is dropped, want it kept")
		}
		put := r.put(1, r.shuffled(1)[0])
		if _, out := r.storeFrom(r.queue, other, put); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrGeometry) {
			t.Errorf("a store failed with %+v, want %v", out.Failed, ErrGeometry)
		}
		if r.hits(1) != 0 {
			t.Error("a piece of another shape is published, want none")
		}
		r.idle()
	})
}

// paired is the same memory, in blocks of two pages each.
func (r *routeRig) paired() Memory {
	r.t.Helper()
	in := func(stride int64, offset int64) Grid {
		return Grid{Offset: offset, Stride: 2 * stride, Blocks: r.memory.Blocks() / 2, Pages: 2, PageStride: stride}
	}
	if r.host != nil { // the pages of a block touch
		var regions []HostRegion
		for plane := range r.geo.Planes {
			first := r.host(plane, 0)
			regions = append(regions, HostRegion{Data: first[:cap(first)], Grid: in(int64(len(first)), 0)})
		}
		m, err := NewHostMemory(r.geo, regions)
		testenv.OK(r.t, err)
		return m
	}
	var regions []DeviceRegion
	for plane, p := range r.planes {
		regions = append(regions, DeviceRegion{Base: p.Address, Bytes: p.Size, Grid: in(int64(r.geo.Planes[plane].PageBytes+64), 32)})
	}
	m, err := NewDeviceMemory(r.gpu, r.geo, regions)
	testenv.OK(r.t, err)
	return m
}

// Blocks may have several of a chunk's pages each. A chunk of those is the same piece as one of blocks with a page each.
func TestEveryRouteMovesBlocksOfSeveralPages(t *testing.T) {
	testenv.Slow(t)
	everyRoute(t, func(t *testing.T, r *routeRig) {
		pairs := r.paired()
		draw := func() (blocks, pages []uint32) {
			for _, b := range r.rng.Perm(int(pairs.Blocks()))[:pairs.ChunkBlocks()] {
				blocks, pages = append(blocks, uint32(b)), append(pages, uint32(2*b), uint32(2*b+1))
			}
			return blocks, pages
		}
		for n, from := range []Memory{pairs, r.from} {
			blocks, pages := draw()
			put := r.put(n, pages)
			if from == pairs {
				put.Blocks = blocks
			}
			if read, out := r.storeFrom(r.queue, from, put); len(read.Failed)+len(out.Failed) > 0 {
				t.Fatalf("a store failed: %+v, %+v", read.Failed, out.Failed)
			}
			for _, by := range []*Layers{nil, {}} {
				for _, to := range []Memory{pairs, r.from} {
					r.poison()
					blocks, pages := draw()
					ids := pages
					if to == pairs {
						ids = blocks
					}
					if out := r.loadTo(r.queue, to, []int{n}, [][]uint32{ids}, by); len(out.Failed) > 0 {
						t.Fatalf("a load failed: %+v", out.Failed)
					}
					r.hold(map[int][]uint32{n: pages}, nil)
				}
			}
			r.poison()
			blocks, pages = draw() // and one that is not wanted
			blocks[0], pages[0], pages[1] = abi.None, abi.None, abi.None
			if out := r.loadTo(r.queue, pairs, []int{n}, [][]uint32{blocks}, nil); len(out.Failed) > 0 {
				t.Fatalf("a load of a part failed: %+v", out.Failed)
			}
			r.hold(map[int][]uint32{n: pages}, nil)
		}
		if _, out := r.storeFrom(r.queue, pairs, r.put(2, r.shuffled(1)[0])); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrBlocks) {
			t.Errorf("a store of twice the blocks failed with %+v, want %v", out.Failed, ErrBlocks)
		}
	})
}

// otherShape is the same memory, as pages of half the size.
func (r *routeRig) otherShape() Memory {
	r.t.Helper()
	geo := kv.Uniform(r.geo.Blocks, uint32(len(r.geo.Planes)), 1, r.geo.Planes[0].PageBytes/2)
	if r.host != nil {
		var regions []HostRegion
		for plane := range r.geo.Planes {
			first := r.host(plane, 0)
			regions = append(regions, HostRegion{Data: first[:cap(first)], Grid: Grid{Stride: int64(len(first)), Blocks: r.memory.Blocks()}})
		}
		m, err := NewHostMemory(geo, regions)
		testenv.OK(r.t, err)
		return m
	}
	var regions []DeviceRegion
	for plane, p := range r.planes {
		regions = append(regions, DeviceRegion{Base: p.Address, Bytes: p.Size,
			Grid: Grid{Offset: 32, Stride: int64(r.geo.Planes[plane].PageBytes + 64), Blocks: r.memory.Blocks()}})
	}
	m, err := NewDeviceMemory(r.gpu, geo, regions)
	testenv.OK(r.t, err)
	return m
}

// A job that is cancelled before it begins touches no page and no piece, and counts neither as moved nor as failed.
func TestEveryRouteSparesCancelledJobs(t *testing.T) {
	everyRoute(t, func(t *testing.T, r *routeRig) {
		r.store(1)
		l := r.lookup(0)
		defer l.Release()
		for _, by := range []*Layers{nil, {}} {
			done := make(chan Outcome, 1)
			h := r.queue.Load(&LoadJob{Lease: l, Memory: r.from, Held: true, Layers: by,
				Chunks: []LoadChunk{{Blocks: r.shuffled(1)[0]}}, Done: func(o Outcome) { done <- o }})
			h.Cancel()
			if out := <-done; len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrCancelled) {
				t.Errorf("a load failed with %+v, want %v", out.Failed, ErrCancelled)
			}
			<-h.Fenced()
		}
		r.hold(nil, nil)
		r.wantMoved(staging.Read, nil, nil)
		put := r.put(1, r.shuffled(1)[0])
		published := make(chan Outcome, 1)
		h := r.queue.Store(&StoreJob{Memory: r.from, Held: true, Chunks: []StoreChunk{put}, Read: func(Outcome) {},
			Published: func(o Outcome) { published <- o }})
		h.Cancel()
		if out := <-published; len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrCancelled) {
			t.Errorf("a store failed with %+v, want %v", out.Failed, ErrCancelled)
		}
		r.wantMoved(staging.Write, map[string]int64{r.route: 1}, nil)
		if r.hits(0) != 1 || r.hits(1) != 0 {
			t.Errorf("%d and %d hits, want the first piece alone", r.hits(0), r.hits(1))
		}
		r.idle()
	})
}

// A piece that the root takes no bytes of fails its chunk alone, and leaves nothing. The route is not to blame, and the chunk can be
// stored again.
func TestEveryRouteFailsStoresOfTheRoot(t *testing.T) {
	everyRoute(t, func(t *testing.T, r *routeRig) {
		from := r.shuffled(2)
		chunks := []StoreChunk{r.put(0, from[0]), r.put(1, from[1])}
		r.fs.Set(faultfs.MustRules(r.breakStores + " **" + deviceKey(0).String() + "**: eio")...)
		_, out := r.storeFrom(r.queue, r.from, chunks...)
		r.fs.Set()
		if len(out.Failed) != 1 || out.Failed[0].Chunk != 0 || !errors.Is(out.Failed[0].Err, unix.EIO) {
			t.Fatalf("failed: %+v, want chunk 0 with %v", out.Failed, unix.EIO)
		}
		if r.hits(0) != 0 || r.hits(1) != 1 {
			t.Errorf("%d and %d hits, want the second piece alone", r.hits(0), r.hits(1))
		}
		failed := r.route
		if failed == "memory" {
			failed = "staged" // it was not seen to be memory
		}
		r.wantMoved(staging.Write, map[string]int64{r.route: 1}, map[string]int64{failed: 1})
		if r.route == "direct" {
			if d := r.stats(); d.StoreFallbacks+d.Suspended != 0 || d.Stores != 1 {
				t.Errorf("the direct route counted %+v, want no fault of its own", d)
			}
		}
		r.idle()
		if _, out := r.storeFrom(r.queue, r.from, r.put(0, from[0])); len(out.Failed) > 0 {
			t.Errorf("the second try failed: %+v, want none", out.Failed)
		}
	})
}
