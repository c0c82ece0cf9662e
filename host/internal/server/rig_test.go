package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// The shape of the tests' chunks: 2 blocks of 2 layers of K and V.
const (
	pageBytes   = 4096
	chunkBlocks = 2
	layers      = 2
	parts       = 2
	arenaBlocks = 64
	planes      = layers * parts
	chunkBytes  = chunkBlocks * planes * pageBytes
)

func testNamespace() kv.Namespace {
	return kv.Namespace{
		Model: "test", DType: "bf16", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32, TokensPerBlock: 16,
		TensorParallel: 1,
		Groups: []kv.Group{
			{ID: 0, Geometry: kv.Uniform(chunkBlocks, layers, parts, pageBytes)},
			{ID: 5, Lookup: kv.ByMembership, Geometry: kv.Uniform(chunkBlocks, layers, parts, pageBytes)},
		},
	}
}

// rig is a real host behind a real socket, on a disk that can be told to misbehave.
type rig struct {
	t      testing.TB
	dir    string
	socket string
	faults *faultfs.FS
	store  *store.Store
	engine *transfer.Engine
	server *Server
	served chan error
	stop   context.CancelFunc
	end    func() // of the host, in order
}

func newRig(t testing.TB, change func(*Config, *store.Config)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv") // a socket's path is short
	testenv.OK(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, dir: dir, socket: filepath.Join(dir, "s"), faults: faultfs.New(staging.OS())}
	sc := store.Config{Roots: []store.RootConfig{{Path: filepath.Join(dir, "root"), Capacity: 256 << 20,
		MaxEntries: 1 << 16}}, FS: r.faults}
	cfg := Config{Version: "test"}
	if change != nil {
		change(&cfg, &sc)
	}
	r.store, err = store.Open(t.Context(), sc)
	testenv.OK(t, err)
	if r.engine, err = transfer.New(transfer.Config{Threads: 4, SlotBytes: 1 << 20, MaxStaging: 8 << 20,
		ReadRatio: 0.5}); err != nil {
		t.Fatal(err)
	}
	cfg.Store, cfg.Engine, cfg.Levels = r.store, r.engine, len(r.store.Stats().Levels)
	r.server = New(cfg)
	r.serve()
	r.end = sync.OnceFunc(func() {
		r.stop()
		if err := <-r.served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		r.engine.Close()
		r.store.Close()
	})
	t.Cleanup(func() {
		r.faults.Release()
		r.faults.Set()
		r.end()
	})
	return r
}

// kill ends the host at once: nothing that it does from now on reaches its files.
func (r *rig) kill() {
	r.faults.Set(faultfs.Rule{Op: staging.OpAny, Path: "**", Fault: faultfs.Fault{Errno: syscall.EACCES}})
	r.end()
}

func (r *rig) serve() {
	ctx, stop := context.WithCancel(context.Background())
	r.stop, r.served = stop, make(chan error, 1)
	go func() { r.served <- r.server.Serve(ctx, r.socket) }()
	select {
	case <-r.server.Ready():
	case err := <-r.served:
		r.t.Fatal(err)
	}
}

func (r *rig) hello() client.Hello {
	return client.Hello{Socket: r.socket, Engine: "e", Role: "worker", LocalRanks: 1, Namespace: testNamespace()}
}

// peer is a client with memory registered for every group.
type peer struct {
	*client.Session
	t     testing.TB
	arena *client.Arena
	regs  map[uint32]*client.Registration
	rank  uint32
}

func (r *rig) dial(change func(*client.Hello)) *peer {
	r.t.Helper()
	h := r.hello()
	if change != nil {
		change(&h)
	}
	s, err := client.Dial(r.t.Context(), h)
	testenv.OK(r.t, err)
	r.t.Cleanup(func() { s.Close() })
	p := &peer{Session: s, t: r.t, regs: map[uint32]*client.Registration{}, rank: h.Rank}
	p.arena, err = s.NewArena(int64(len(h.Namespace.Groups)) * planes * arenaBlocks * pageBytes)
	testenv.OK(r.t, err)
	r.t.Cleanup(func() { p.arena.Close() })
	for i, g := range h.Namespace.Groups {
		p.regs[g.ID], err = s.Register(r.t.Context(), g.ID, p.arena, groupRegions(i))
		testenv.OK(r.t, err)
	}
	return p
}

func base(group, plane int) int64 { return int64(group*planes+plane) * arenaBlocks * pageBytes }

// groupRegions are the planes of a group in an arena.
func groupRegions(group int) (regions []client.PlaneRegion) {
	for pl := range planes {
		regions = append(regions, client.PlaneRegion{Offset: base(group, pl), Stride: pageBytes, Blocks: arenaBlocks})
	}
	return regions
}

// loadsHanging begins to load the first n chunks, while reads hang.
func (p *peer) loadsHanging(r *rig, n int) *client.LoadJob {
	p.t.Helper()
	r.faults.Set(faultfs.MustRules("read *: hang")...)
	job := p.loads(p.look(n), n)
	testenv.OK(p.t, r.faults.AwaitHanging(testenv.Context(p.t), 1))
	return job
}

// page is a block's bytes in one plane of the first group.
func (p *peer) page(plane int, block uint32) []byte {
	at := base(0, plane) + int64(block)*pageBytes
	return p.arena.Bytes()[at : at+pageBytes]
}

func key(n int) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	k[31] = 1
	return k
}

func keys(n int) (list []kv.Key) {
	for i := range n {
		list = append(list, key(i))
	}
	return list
}

// blocks are those of the i-th chunk in the arena.
func blocks(i int) []uint32 { return []uint32{uint32(i * chunkBlocks), uint32(i*chunkBlocks) + 1} }

// fill writes what chunk n of this rank holds to the blocks of place i.
func (p *peer) fill(n, i int) {
	for pl := range planes {
		for j, b := range blocks(i) {
			copy(p.page(pl, b), pattern(n, int(p.rank), pl, j))
		}
	}
}

// holds says whether place i holds chunk n of this rank.
func (p *peer) holds(n, i int) bool {
	for pl := range planes {
		for j, b := range blocks(i) {
			if !bytes.Equal(p.page(pl, b), pattern(n, int(p.rank), pl, j)) {
				return false
			}
		}
	}
	return true
}

func (p *peer) poison(i int) {
	for pl := range planes {
		for _, b := range blocks(i) {
			clear(p.page(pl, b))
		}
	}
}

func pattern(n, rank, plane, block int) []byte {
	out := make([]byte, pageBytes)
	for i := 0; i < len(out); i += 8 {
		binary.LittleEndian.PutUint64(out[i:],
			uint64(n)<<40|uint64(rank)<<32|uint64(plane)<<24|uint64(block)<<16|uint64(i))
	}
	return out
}

func chunkOf(n, i int) client.StoreChunk {
	c := client.StoreChunk{Key: key(n), Depth: uint32(n), Blocks: blocks(i)}
	if n > 0 {
		c.Parent = key(n - 1)
	}
	return c
}

// save stores chunks from to to, each from the place of its number, and wants them stored.
func (p *peer) save(from, to int) client.StoreResult {
	p.t.Helper()
	var list []client.StoreChunk
	for n := from; n < to; n++ {
		p.fill(n, n)
		list = append(list, chunkOf(n, n))
	}
	res, err := p.store(list)
	testenv.OK(p.t, err)
	for i, c := range res.Chunks {
		if c.Result != client.Stored {
			p.t.Fatalf("chunk %d: %v, %v", from+i, c.Result, c.Err)
		}
	}
	return res
}

func (p *peer) store(list []client.StoreChunk) (client.StoreResult, error) {
	job, err := p.Store(p.t.Context(), 0, 0, list)
	if err != nil {
		return client.StoreResult{}, err
	}
	if err := job.Read(p.t.Context()); err != nil {
		return client.StoreResult{}, err
	}
	return job.Published(p.t.Context())
}

func (p *peer) look(n int) *client.Lookup {
	p.t.Helper()
	l, err := p.Lookup(p.t.Context(), client.LookupRequest{Keys: keys(n)})
	testenv.OK(p.t, err)
	return l
}

// loads begins to load a lookup's first n keys, each to the place of its number.
func (p *peer) loads(l *client.Lookup, n int) *client.LoadJob {
	p.t.Helper()
	var list []client.LoadChunk
	for i := range n {
		p.poison(i)
		list = append(list, client.LoadChunk{Index: i, Blocks: blocks(i)})
	}
	job, err := p.Load(p.t.Context(), l, list, client.LoadOptions{})
	testenv.OK(p.t, err)
	return job
}

func (p *peer) loaded(job *client.LoadJob) client.LoadResult {
	p.t.Helper()
	res, err := job.Wait(p.t.Context())
	testenv.OK(p.t, err)
	return res
}

// check loads the first n chunks and compares every byte.
func (p *peer) check(n int) {
	p.t.Helper()
	l := p.look(n)
	if l.Hits() != n {
		p.t.Fatalf("%d hits of %d", l.Hits(), n)
	}
	if res := p.loaded(p.loads(l, n)); len(res.Failed) != 0 || res.Bytes != int64(n)*chunkBytes {
		p.t.Fatalf("%d bytes, failed: %v", res.Bytes, res.Failed)
	}
	for i := range n {
		if !p.holds(i, i) {
			p.t.Fatalf("chunk %d differs", i)
		}
	}
}

// until waits for a condition that the server reaches by itself.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	testenv.Until(t, what, cond)
}

// temporaries lists files of the root that are neither pieces nor the store's own.
func (r *rig) temporaries() (list []string) {
	filepath.WalkDir(filepath.Join(r.dir, "root"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(filepath.Base(path), ".tmp") {
			list = append(list, path)
		}
		return nil
	})
	return list
}

// mappings counts the client memory that this process has mapped besides its own arenas.
func mappings(t testing.TB) (n int) {
	b, err := os.ReadFile("/proc/self/maps")
	testenv.OK(t, err)
	return strings.Count(string(b), "kvhost-arena")
}
