package transfer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// bench is a store on real files, an engine, and one rank's pages.
type bench struct {
	t      testing.TB
	fs     *faultfs.FS
	root   string
	config store.Config
	store  *store.Store
	engine *transfer.Engine
	queue  *transfer.Queue
	space  *catalog.Namespace
	memory *transfer.HostMemory
	planes [][]byte
	geo    kv.Geometry
	rng    *rand.Rand
	fill   func(page []byte, key kv.Key, plane, block int) // writes what the pages must hold

	pageBytes map[[3]int][]byte // see wanted
}

const poison = 0xa5

func newBench(t testing.TB, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) *bench {
	t.Helper()
	b := &bench{t: t, fs: faultfs.New(staging.OS()), root: filepath.Join(t.TempDir(), "root"), geo: geo,
		rng: rand.New(rand.NewPCG(1, 2)), fill: fillPage}
	b.config = store.Config{Roots: []store.RootConfig{{Path: b.root, Capacity: 1 << 30}}, FS: b.fs}
	for _, c := range change {
		c(&b.config)
	}
	b.open()
	var err error
	b.engine, err = transfer.New(transfer.Config{
		Threads: 4, SlotBytes: transfer.MinSlotBytes, MaxStaging: 4 * transfer.MinSlotBytes, ReadRatio: 0.75,
		Roots: len(b.config.Roots),
	})
	testenv.OK(t, err)
	t.Cleanup(func() {
		b.fs.Set()
		testenv.NoError(t, b.engine.Close())
		testenv.NoError(t, b.store.Close())
	})
	b.queue, err = b.engine.Queue("host")
	testenv.OK(t, err)
	var regions []transfer.HostRegion
	for _, p := range geo.Planes {
		stride := int64(p.PageBytes) + 64 // pages do not touch: a copy that runs over is seen
		mem := make([]byte, 32+stride*int64(blocks))
		b.planes = append(b.planes, mem)
		regions = append(regions, transfer.HostRegion{Data: mem, Grid: transfer.Grid{Offset: 32, Stride: stride, Blocks: blocks}})
	}
	b.memory, err = transfer.NewHostMemory(geo, regions)
	testenv.OK(t, err)
	return b
}

// open starts the store.
func (b *bench) open() {
	b.t.Helper()
	var err error
	b.store, err = store.Open(context.Background(), b.config)
	testenv.OK(b.t, err)
	b.space, err = b.store.Namespace(context.Background(), &kv.Namespace{
		Model: "test/model", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: b.geo}},
	})
	testenv.OK(b.t, err)
}

func (b *bench) page(plane int, id uint32) []byte {
	n := int(b.geo.Planes[plane].PageBytes)
	at := 32 + int(id)*(n+64)
	return b.planes[plane][at : at+n]
}

// fillPage writes what (key, plane, block, offset) must hold.
func fillPage(page []byte, key kv.Key, plane, block int) {
	testenv.Fill(page, binary.LittleEndian.Uint64(key[:])^uint64(plane)<<32^uint64(block)<<48)
}

func key(n int) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	k[31] = 7
	return k
}

// shuffled gives n distinct block ids.
func (b *bench) shuffled(n int) []uint32 {
	ids := make([]uint32, b.memory.Blocks())
	for i, p := range b.rng.Perm(len(ids)) {
		ids[i] = uint32(p)
	}
	return ids[:n]
}

func (b *bench) poison() {
	for _, p := range b.planes {
		p[0] = poison
		for n := 1; n < len(p); n *= 2 {
			copy(p[n:], p[:n])
		}
	}
}

// put fills the pages of chunk n at the given ids and reserves its place.
func (b *bench) put(n int, ids []uint32) transfer.StoreChunk {
	b.t.Helper()
	for plane := range b.geo.Planes {
		for i, id := range ids {
			b.fill(b.page(plane, id), key(n), plane, i)
		}
	}
	parent := kv.Root
	if n > 0 {
		parent = key(n - 1)
	}
	p, err := b.store.Put(context.Background(), store.PutRequest{Namespace: b.space, Parent: parent, Key: key(n),
		Depth: uint32(n), Ranks: 1})
	if err != nil {
		b.t.Fatalf("put %d: %v", n, err)
	}
	return transfer.StoreChunk{Put: p, Blocks: ids}
}

// storeAll stores chunks and gives both outcomes.
func (b *bench) storeAll(chunks ...transfer.StoreChunk) (read, published transfer.Outcome) {
	var wg sync.WaitGroup
	wg.Add(2)
	b.queue.Store(&transfer.StoreJob{
		Memory: b.memory, Chunks: chunks,
		Read:      func(o transfer.Outcome) { read = o; wg.Done() },
		Published: func(o transfer.Outcome) { published = o; wg.Done() },
	})
	wg.Wait()
	return read, published
}

func (b *bench) lease(n ...int) *store.Lease {
	b.t.Helper()
	var keys []kv.Key
	for _, i := range n {
		keys = append(keys, key(i))
	}
	l, err := b.store.Lookup(store.LookupRequest{Namespace: b.space, Keys: keys, Ranks: 1})
	testenv.OK(b.t, err)
	return l
}

func (b *bench) load(l *store.Lease, chunks []transfer.LoadChunk, layers *transfer.Layers) transfer.Outcome {
	done := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: chunks, Layers: layers,
		Done: func(o transfer.Outcome) { done <- o }})
	return <-done
}

// checkPages compares every page of a loaded chunk.
func (b *bench) checkPages(n int, ids []uint32) error {
	for plane := range b.geo.Planes {
		for i, id := range ids {
			if id == abi.None {
				continue
			}
			want := make([]byte, b.geo.Planes[plane].PageBytes)
			b.fill(want, key(n), plane, i)
			if !bytes.Equal(b.page(plane, id), want) {
				return fmt.Errorf("chunk %d plane %d block %d (id %d) differs", n, plane, i, id)
			}
		}
	}
	return nil
}

// checkRightSoFar says whether each byte of the pages of ids is chunk n's, or poison still: what reached the pages
// of a chunk that failed, before its damage was met.
func (b *bench) checkRightSoFar(n int, ids []uint32) error {
	for plane := range b.geo.Planes {
		for i, id := range ids {
			want := make([]byte, b.geo.Planes[plane].PageBytes)
			b.fill(want, key(n), plane, i)
			for at, c := range b.page(plane, id) {
				if c != want[at] && c != poison {
					return fmt.Errorf("chunk %d plane %d block %d byte %d holds a wrong byte", n, plane, i, at)
				}
			}
		}
	}
	return nil
}

// checkUntouched says whether the pages of ids hold nothing but poison.
func (b *bench) checkUntouched(ids []uint32) error {
	for plane := range b.geo.Planes {
		for _, id := range ids {
			for at, c := range b.page(plane, id) {
				if c != poison {
					return fmt.Errorf("plane %d id %d byte %d was written", plane, id, at)
				}
			}
		}
	}
	return nil
}

// checkBetween says whether the bytes between pages are still poison.
func (b *bench) checkBetween() error {
	for plane, p := range b.geo.Planes {
		stride := int(p.PageBytes) + 64
		mem := b.planes[plane]
		for at := 0; at < len(mem); at++ {
			if in := (at - 32 + stride) % stride; at >= 32 && in < int(p.PageBytes) {
				continue
			}
			if mem[at] != poison {
				return fmt.Errorf("plane %d: byte %d between pages was written", plane, at)
			}
		}
	}
	return nil
}

var geometries = map[string]kv.Geometry{
	"one small page":        kv.Uniform(1, 1, 1, 64),
	"pages of 4 KiB":        kv.Uniform(4, 3, 2, 4096),
	"unaligned, one window": kv.Uniform(16, 2, 1, 18432),
	"odd sizes": {Blocks: 5, Planes: []kv.Plane{{Layer: 0, PageBytes: 1}, {Layer: 1, PageBytes: 70001},
		{Layer: 1, Part: 1, PageBytes: 333}}},
	"several windows":    kv.Uniform(16, 8, 2, 16384),
	"unaligned windows":  kv.Uniform(16, 7, 1, 41984),
	"page over the slot": kv.Uniform(1, 2, 1, 3<<20),
}

// Chunks of all shapes come back to other blocks, whole and by layers, from files and from memory in one segment and in many.
func TestRoundTrip(t *testing.T) {
	testenv.Slow(t)
	for kind, open := range map[string]func(t *testing.T, geo kv.Geometry, blocks uint32) *bench{
		"": func(t *testing.T, geo kv.Geometry, blocks uint32) *bench { return newBench(t, geo, blocks) },
		", compressed": func(t *testing.T, geo kv.Geometry, blocks uint32) *bench {
			return newCompressed(t, geo, blocks)
		},
		", memory": func(t *testing.T, geo kv.Geometry, blocks uint32) *bench {
			b, _ := newMemoryBench(t, geo, blocks, 1)
			return b
		},
		", memory in segments": func(t *testing.T, geo kv.Geometry, blocks uint32) *bench {
			b, _ := newMemoryBench(t, geo, blocks, 2)
			return b
		},
	} {
		for name, geo := range geometries {
			t.Run(name+kind, func(t *testing.T) {
				const chunks = 3
				b, per := open(t, geo, geo.Blocks*chunks+3), int(geo.Blocks)
				b.poison()
				ids := b.shuffled(per * chunks)
				var stores []transfer.StoreChunk
				for n := range chunks {
					stores = append(stores, b.put(n, ids[n*per:(n+1)*per]))
				}
				read, published := b.storeAll(stores...)
				if len(read.Failed)+len(published.Failed) > 0 || published.Bytes != chunks*geo.PageBytes() {
					t.Fatalf("store: %+v, %+v", read, published)
				}
				for _, layers := range []*transfer.Layers{nil, {}} {
					b.poison()
					ids = b.shuffled(per * chunks)
					var loads []transfer.LoadChunk
					for n := range chunks {
						loads = append(loads, transfer.LoadChunk{Index: n, Blocks: ids[n*per : (n+1)*per]})
					}
					b.loadRight(loads, layers)
					testenv.NoError(t, b.checkBetween())
				}
				if strings.HasPrefix(kind, ", memory") {
					if err := b.byMemory(); err != nil && (kind == ", memory" || b.engine.Stats().LoadErrors > 0) {
						t.Error(err)
					}
				}
			})
		}
	}
}

// loadRight loads chunks from 0 on, and compares each page.
func (b *bench) loadRight(loads []transfer.LoadChunk, layers *transfer.Layers) {
	b.t.Helper()
	list := make([]int, len(loads))
	for n := range list {
		list[n] = n
	}
	l := b.lease(list...)
	defer l.Release()
	if out := b.load(l, loads, layers); len(out.Failed) > 0 || out.Bytes != int64(len(loads))*b.geo.PageBytes() {
		b.t.Fatalf("loaded %d bytes of %d chunks, %+v failed; want all", out.Bytes, len(loads), out.Failed)
	}
	for n, c := range loads {
		testenv.NoError(b.t, b.checkPages(n, c.Blocks))
	}
}
