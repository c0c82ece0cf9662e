package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// pieces are the piece files under the root.
func (b *bench) pieces() []string {
	b.t.Helper()
	var out []string
	err := filepath.WalkDir(b.root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, ".kv") &&
			!strings.Contains(path, "/.kvhost") {
			out = append(out, path)
		}
		return err
	})
	testenv.OK(b.t, err)
	return out
}

func (b *bench) pieceOf(n int) string {
	b.t.Helper()
	for _, p := range b.pieces() {
		if strings.Contains(p, key(n).String()) {
			return p
		}
	}
	b.t.Fatalf("no piece of chunk %d", n)
	return ""
}

// storeChunks stores chunks 0 to n-1, each over all of its own blocks, and poisons the pages.
func (b *bench) storeChunks(n int) {
	b.t.Helper()
	for i := range n {
		ids := make([]uint32, b.geo.Blocks)
		for k := range ids {
			ids[k] = uint32(k)
		}
		if _, out := b.storeAll(b.put(i, ids)); len(out.Failed) > 0 {
			b.t.Fatal(out.Failed[0].Err)
		}
	}
	b.poison()
}

// spread gives chunk n the blocks [n*Blocks, (n+1)*Blocks).
func (b *bench) spread(chunks int) []transfer.LoadChunk {
	out := make([]transfer.LoadChunk, chunks)
	for n := range out {
		out[n].Index = n
		for k := range b.geo.Blocks {
			out[n].Blocks = append(out[n].Blocks, uint32(n)*b.geo.Blocks+k)
		}
	}
	return out
}

// failsAlone loads three chunks, whole or layer-wise, and says how chunk 1 failed, which no other may do. None of its pages got
// a wrong byte, and the next lookup misses it.
func (b *bench) failsAlone(layers bool) error {
	b.t.Helper()
	l := b.lease(0, 1, 2)
	defer l.Release()
	b.poison()
	loads := b.spread(3)
	var by *transfer.Layers
	if layers {
		lost := false
		by = &transfer.Layers{Landed: func(layer uint32, failed []int) {
			if lost && !slices.Contains(failed, 1) {
				b.t.Errorf("layer %d failed for chunks %v, want 1, which failed before", layer, failed)
			}
			lost = lost || slices.Contains(failed, 1)
		}}
	}
	out := b.load(l, loads, by)
	if len(out.Failed) != 1 || out.Failed[0].Chunk != 1 {
		b.t.Fatalf("failed: %+v", out.Failed)
	}
	for _, n := range []int{0, 2} {
		testenv.NoError(b.t, b.checkPages(n, loads[n].Blocks))
	}
	testenv.NoError(b.t, b.checkRightSoFar(1, loads[1].Blocks))
	again := b.lease(0, 1, 2)
	defer again.Release()
	if again.Hits() != 1 {
		b.t.Errorf("the next lookup still grants %d of the prefix, want 1", again.Hits())
	}
	return out.Failed[0].Err
}

// TestDamageFailsItsChunkOnly damages one of three pieces in every way a disk can and sees that exactly this chunk
// fails. Where it is compressed, no decoder gets what is damaged: the error is of a checksum.
func TestDamageFailsItsChunkOnly(t *testing.T) {
	testenv.Slow(t)
	geo := kv.Uniform(8, 6, 1, 40000) // 1.9 MiB: two windows, or several slots' parts
	change := func(b *bench, at int64) { transfer.ChangeByte(b.t, b.pieceOf(1), at, 0x10) }
	flip := func(at int64) func(*bench, int64) { return func(b *bench, _ int64) { change(b, at) } }
	truncate := func(n int64) func(*bench, int64) {
		return func(b *bench, _ int64) {
			testenv.OK(b.t, os.Truncate(b.pieceOf(1), n))
		}
	}
	for _, c := range []struct {
		open   func(t testing.TB, geo kv.Geometry, blocks uint32, more ...func(*store.Config)) *bench
		damage map[string]func(b *bench, size int64)
	}{
		{newBench, map[string]func(b *bench, size int64){
			"header":         flip(100),
			"checksum table": flip(4096 + 8),
			"first page":     flip(8192),
			"middle":         flip(8192 + 1<<20),
			"last extent":    flip(8192 + 8*6*40000 - 1),
			"cut in half":    truncate(1 << 20),
			"not aligned":    truncate(1<<20 + 17),
			"header only":    truncate(4096),
			"empty":          truncate(0),
			"gone": func(b *bench, _ int64) {
				testenv.OK(b.t, os.Remove(b.pieceOf(1)))
			},
		}},
		{newCompressed, map[string]func(b *bench, size int64){
			"version":             flip(8),
			"stored bytes":        flip(200),
			"table: page sum":     flip(4096),
			"table: stored sum":   flip(4096 + 24 + 8),
			"table: length":       flip(4096 + 24 + 16),
			"table: codec":        flip(4096 + 24 + 20),
			"first stored extent": flip(8192),
			"its codes":           flip(8192 + 20000),
			"stored middle":       func(b *bench, size int64) { change(b, size/2) },
			"last stored extent":  func(b *bench, size int64) { change(b, size-4097) },
		}},
	} {
		for name, damage := range c.damage {
			for _, layers := range []bool{false, true} {
				t.Run(name, func(t *testing.T) {
					b := c.open(t, geo, geo.Blocks*3)
					b.storeChunks(3)
					info, err := os.Stat(b.pieceOf(1))
					testenv.OK(t, err)
					damage(b, info.Size())
					if err := b.failsAlone(layers); errors.Is(err, codec.ErrCorrupt) {
						t.Errorf("a decoder was given damaged bytes: %v", err)
					}
				})
			}
		}
	}
}

func TestWriteErrorsFailTheirChunkAndLeaveNothing(t *testing.T) {
	geo := kv.Uniform(4, 4, 1, 100_000) // two windows and a header written apart
	for name, rule := range map[string]string{
		"no space":               "write ** 1st: enospc",
		"no space, later window": "write ** 2nd: enospc",
		"i/o error on header":    "write ** 3rd: eio",
		"torn":                   "write ** 2nd: torn 5000",
		"cannot create":          "open **.tmp 1st: eacces",
		"cannot publish":         "publish,rename,link **.tmp: eio",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, geo, 4)
			b.fs.Set(faultfs.MustRules(rule)...)
			read, published := b.storeAll(b.put(0, []uint32{0, 1, 2, 3}))
			if len(published.Failed) != 1 {
				t.Fatalf("outcomes %+v %+v; injected %d", read, published, b.fs.Injected())
			}
			b.fs.Set()
			if files := b.pieces(); len(files) > 0 {
				t.Errorf("left %v", files)
			}
			if st := b.store.Stats().Roots[0]; st.Used != 0 || st.Entries != 0 {
				t.Errorf("%d bytes and %d entries are still counted", st.Used, st.Entries)
			}
			// and the same chunk can be stored again
			if _, out := b.storeAll(b.put(0, []uint32{0, 1, 2, 3})); len(out.Failed) > 0 {
				t.Errorf("second try: %v", out.Failed[0].Err)
			}
		})
	}
}

func TestBlockIdsAreCheckedBeforeAnythingMoves(t *testing.T) {
	geo := kv.Uniform(2, 1, 1, 4096)
	for name, ids := range map[string][]uint32{
		"out of range": {0, 4},
		"far out":      {0, abi.None - 1},
		"too few":      {0},
		"too many":     {0, 1, 2},
		"none":         nil,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, geo, 4)
			b.storeChunks(1)
			l := b.lease(0)
			defer l.Release()
			out := b.load(l, []transfer.LoadChunk{{Blocks: ids}}, nil)
			if len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, transfer.ErrBlocks) {
				t.Errorf("load: %+v", out)
			}
			testenv.NoError(t, b.checkUntouched([]uint32{0, 1, 2, 3}))
			c := b.put(1, []uint32{0, 1})
			c.Blocks = ids
			if _, out := b.storeAll(c); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, transfer.ErrBlocks) {
				t.Errorf("store: %+v", out)
			}
		})
	}
	t.Run("a store has no holes", func(t *testing.T) {
		b := newBench(t, geo, 4)
		c := b.put(0, []uint32{0, 1})
		c.Blocks = []uint32{0, abi.None}
		if _, out := b.storeAll(c); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, transfer.ErrBlocks) {
			t.Errorf("store: %+v", out)
		}
	})
}

func TestRegionsAreChecked(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	ok := transfer.HostRegion{Data: make([]byte, 4*5000), Grid: transfer.Grid{Stride: 5000, Blocks: 4}}
	for name, change := range map[string]func(*transfer.HostRegion){
		"no blocks":         func(r *transfer.HostRegion) { r.Blocks = 0 },
		"pages overlap":     func(r *transfer.HostRegion) { r.Stride = 4095 },
		"negative offset":   func(r *transfer.HostRegion) { r.Offset = -1 },
		"starts too late":   func(r *transfer.HostRegion) { r.Offset = 4 * 5000 },
		"last page is cut":  func(r *transfer.HostRegion) { r.Data = r.Data[:3*5000+4095] },
		"wraps":             func(r *transfer.HostRegion) { r.Stride = 1 << 62 },
		"another count":     func(r *transfer.HostRegion) { r.Blocks = 3 },
		"endless count":     func(r *transfer.HostRegion) { r.Blocks = 0xffffffff },
		"offset near limit": func(r *transfer.HostRegion) { r.Offset = 1<<63 - 1 },
	} {
		t.Run(name, func(t *testing.T) {
			bad := ok
			change(&bad)
			if _, err := transfer.NewHostMemory(geo, []transfer.HostRegion{ok, bad}); !errors.Is(err,
				transfer.ErrRegion) {
				t.Errorf("bad regions: got error %v, want ErrRegion", err)
			}
		})
	}
	if _, err := transfer.NewHostMemory(geo, []transfer.HostRegion{ok, ok}); err != nil {
		t.Errorf("a sound pair: %v", err)
	}
	if _, err := transfer.NewHostMemory(geo, []transfer.HostRegion{ok}); !errors.Is(err, transfer.ErrRegion) {
		t.Errorf("one region for two planes: %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := transfer.Config{Threads: 1, SlotBytes: transfer.MinSlotBytes, MaxStaging: transfer.MinSlotBytes}
	for name, change := range map[string]func(*transfer.Config){
		"threads":   func(c *transfer.Config) { c.Threads = 0 },
		"slot":      func(c *transfer.Config) { c.SlotBytes = 4096 },
		"alignment": func(c *transfer.Config) { c.SlotBytes++ },
		"staging":   func(c *transfer.Config) { c.MaxStaging-- },
	} {
		t.Run(name, func(t *testing.T) {
			c := good
			change(&c)
			if _, err := transfer.New(c); !errors.Is(err, transfer.ErrConfig) {
				t.Errorf("bad configuration: got error %v, want ErrConfig", err)
			}
		})
	}
}

// TestStoresThatWaitTooLongAreShed: with every worker held by the disk, what waits behind is given up, its blocks
// are free, and a load that waits is not.
func TestStoresThatWaitTooLongAreShed(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, 32)
	b.storeChunks(1)
	engine, err := transfer.New(transfer.Config{
		Threads: 2, SlotBytes: transfer.MinSlotBytes, MaxStaging: 4 * transfer.MinSlotBytes, ReadRatio: 0.75,
	})
	testenv.OK(t, err)
	defer engine.Close()
	queue, err := engine.Queue("host")
	testenv.OK(t, err)
	b.fs.Set(faultfs.MustRules("write **: hang")...)
	store := func(from, to int) (read, published chan transfer.Outcome) {
		var chunks []transfer.StoreChunk
		for n := from; n < to; n++ {
			chunks = append(chunks, b.put(n+1, []uint32{uint32(2 * n), uint32(2*n + 1)}))
		}
		read, published = make(chan transfer.Outcome, 1), make(chan transfer.Outcome, 1)
		queue.Store(&transfer.StoreJob{Memory: b.memory, Chunks: chunks, Read: func(o transfer.Outcome) { read <- o },
			Published: func(o transfer.Outcome) { published <- o }})
		return read, published
	}
	_, first := store(0, 2)
	testenv.OK(t, b.fs.AwaitHanging(testenv.Context(t), 2))
	engine.SetWriteQueue(50 * time.Millisecond)
	read, second := store(2, 6)
	if o := <-read; len(o.Failed) != 4 || !errors.Is(o.Failed[0].Err, transfer.ErrShed) ||
		engine.Stats().StoresShed != 4 {
		t.Fatalf("stores beyond the queue: got %+v with %+v, want 4 chunks shed", o, engine.Stats())
	}
	l := b.lease(0)
	defer l.Release()
	done := make(chan transfer.Outcome, 1)
	queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: b.spread(1),
		Done: func(o transfer.Outcome) { done <- o }})
	b.fs.Release()
	b.fs.Set()
	if o := <-done; len(o.Failed) > 0 {
		t.Errorf("the load that held the workers failed: %+v", o)
	}
	if o := <-first; len(o.Failed) > 0 {
		t.Errorf("the first store failed: %+v", o)
	}
	if o := <-second; len(o.Failed) != 4 {
		t.Errorf("the second store: got %+v, want 4 chunks failed", o)
	}
	if st := b.store.Stats().Roots[0]; st.Writing != 0 || st.Entries != 3 {
		t.Errorf("%d bytes are being written, %d entries", st.Writing, st.Entries)
	}
}

// TestDamageIsNotServed: the key of a piece is verified, and its bytes are after a restart, too. TestDamageFailsItsChunkOnly has all kinds of
// damage.
func TestDamageIsNotServed(t *testing.T) {
	geo := kv.Uniform(8, 6, 1, 40000)
	b := newBench(t, geo, geo.Blocks*4)
	b.storeChunks(4)
	three, err := os.ReadFile(b.pieceOf(3))
	testenv.OK(t, err)
	other := newBench(t, geo, geo.Blocks)
	other.storeChunks(1)
	if err := os.WriteFile(other.pieceOf(0), three, 0o600); err != nil { // another key's, sound in itself
		t.Fatal(err)
	}
	m := other.lease(0)
	defer m.Release()
	if out := other.load(m, other.spread(1), nil); len(out.Failed) != 1 ||
		!errors.Is(out.Failed[0].Err, pieceformat.ErrWrongPiece) {
		t.Errorf("another key's piece: %+v", out)
	}

	// A restart finds the piece by its header. Its payload is verified by the load.
	b.config.FS = staging.OS()
	transfer.ChangeByte(t, b.pieceOf(3), 8192, 0x10)
	testenv.OK(t, b.store.Close())
	b.open()
	l := b.lease(3)
	defer l.Release()
	b.poison()
	if out := b.load(l, b.spread(1), nil); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, kv.ErrChecksum) {
		t.Errorf("after a restart: %+v", out)
	}
}

// TestHungRoot hangs every read of a root. Its loads fail in bounded time and touch nothing, the workers are free
// for the other root, and the slots are back when the reads have ended. See closeDuringHungRead for the bubble.
func TestHungRoot(t *testing.T) { synctest.Test(t, hungRoot) }

func hungRoot(t *testing.T) {
	geo := kv.Uniform(8, 6, 1, 40000)
	const chunks = 8 // twice the workers, and the slots
	b := newBench(t, geo, geo.Blocks*chunks, func(c *store.Config) {
		c.IOTimeout, c.UpkeepEvery = time.Second, 5*time.Millisecond
	})
	b.storeChunks(chunks)
	var list []int
	for n := range chunks {
		list = append(list, n)
	}
	l := b.lease(list...)
	if l.Hits() != chunks {
		t.Fatalf("%d hits", l.Hits())
	}
	b.fs.Set(faultfs.MustRules("read **.kv: hang")...)
	b.poison()
	loads := b.spread(chunks)
	out := b.load(l, loads, nil)
	l.Release()
	if len(out.Failed) != chunks || out.Bytes != 0 {
		t.Fatalf("load: got %+v, want all %d chunks failed and no byte", out, chunks)
	}
	hung := 0
	for _, f := range out.Failed {
		switch {
		case errors.Is(f.Err, staging.ErrHung):
			hung++
		case !errors.Is(f.Err, store.ErrRootOut):
			t.Errorf("a chunk failed with %v, want ErrHung or ErrRootOut", f.Err)
		}
	}
	if hung == 0 || hung > 4 {
		t.Errorf("%d operations hang, there are 4 workers", hung)
	}
	// A task that was refused gives its slot back after the job is over.
	testenv.Until(t, "one slot for each read that hangs", func() bool { return b.engine.Stats().SlotsInUse == hung },
		func() any { return b.engine.Stats() })
	if l := b.lease(list...); l.Hits() != 0 {
		t.Errorf("%d hits in a root that hangs", l.Hits())
	}
	_, err := b.store.Put(context.Background(), store.PutRequest{Namespace: b.space, Key: key(100), Ranks: 1})
	if !errors.Is(err, store.ErrRootOut) {
		t.Errorf("a store: %v", err)
	}
	b.fs.Release()
	testenv.Until(t, "a root in service, and no slot in use", func() bool {
		return b.store.Stats().Roots[0].State == health.In && b.engine.Stats().SlotsInUse == 0
	}, func() any {
		return fmt.Sprintf("%+v, %d slots in use", b.store.Stats().Roots[0], b.engine.Stats().SlotsInUse)
	})
	for plane := range b.planes { // what was read too late went nowhere
		for id := range b.memory.Blocks() {
			if slices.ContainsFunc(b.page(plane, id), func(c byte) bool { return c != poison }) {
				t.Fatalf("plane %d, block %d was written", plane, id)
			}
		}
	}
	b.fs.Set()
	read := 0
	for n := range chunks {
		l := b.lease(n)
		if l.Hits() == 1 {
			if out := b.load(l, []transfer.LoadChunk{{Blocks: loads[n].Blocks}}, nil); len(out.Failed) > 0 {
				t.Errorf("chunk %d: %v", n, out.Failed)
			} else if err := b.checkPages(n, loads[n].Blocks); err != nil {
				t.Error(err)
			}
			read++
		}
		l.Release()
	}
	if read != chunks-hung {
		t.Errorf("%d of %d chunks are left, and %d reads hung", read, chunks, hung)
	}
}
