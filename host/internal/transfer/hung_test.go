package transfer_test

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestCloseDuringHungRead closes an engine while an abandoned read still uses a slot. The storage failed, not the
// engine: Close logs it and succeeds, and the memory goes when the read returns. In a bubble the limit passes only when all
// else waits, however slow the disk is.
func TestCloseDuringHungRead(t *testing.T) { synctest.Test(t, closeDuringHungRead) }

func closeDuringHungRead(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks, func(c *store.Config) { c.IOTimeout = time.Second })
	b.storeChunks(1)
	var log bytes.Buffer
	engine, err := transfer.New(transfer.Config{
		Threads: 1, SlotBytes: transfer.MinSlotBytes, MaxStaging: 2 * transfer.MinSlotBytes, ReadRatio: 0.75,
		Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	testenv.OK(t, err)
	queue, err := engine.Queue("host")
	testenv.OK(t, err)
	b.fs.Set(faultfs.MustRules("read **/" + filepath.Base(b.pieceOf(0)) + ": hang")...)
	defer b.fs.Release()
	l := b.lease(0)
	defer l.Release()
	done := make(chan transfer.Outcome, 1)
	queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: b.spread(1),
		Done: func(o transfer.Outcome) { done <- o }})
	if o := <-done; len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, staging.ErrHung) {
		t.Fatalf("load of a hung file: got %+v, want 1 chunk failed with ErrHung", o)
	}
	if err := engine.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if !strings.Contains(log.String(), "staging memory stays mapped") || !strings.Contains(log.String(), "slots=1") {
		t.Errorf("log: %s", log.String())
	}
}

// TestHungRootLeavesWorkers hangs one of two roots, without a limit of time, under more loads than there are
// workers: those from the other root are delivered meanwhile.
func TestHungRootLeavesWorkers(t *testing.T) {
	const chunks = 24
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*chunks, func(c *store.Config) {
		c.IOTimeout = -1
		c.Roots = append(c.Roots, store.RootConfig{Path: filepath.Join(t.TempDir(), "other"), Capacity: 1 << 30})
	})
	b.storeChunks(chunks)
	var list []int
	for n := range chunks {
		list = append(list, n)
	}
	l := b.lease(list...)
	defer l.Release()
	var hung, well []transfer.LoadChunk
	for i, c := range b.spread(chunks) {
		c.Index = i
		if l.Root(i) == b.root {
			hung = append(hung, c)
		} else {
			well = append(well, c)
		}
	}
	if len(hung) < 5 || len(well) < 5 {
		t.Fatalf("%d and %d chunks in the two roots", len(hung), len(well))
	}
	b.fs.Set(faultfs.MustRules("read **/" + filepath.Base(b.root) + "/**.kv: hang")...)
	b.poison()
	stuck := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: hung,
		Done: func(o transfer.Outcome) { stuck <- o }})
	if out := b.load(l, well, nil); len(out.Failed) > 0 {
		t.Errorf("load from the root that is well failed: %+v", out)
	}
	for _, c := range well {
		testenv.NoError(t, b.checkPages(c.Index, c.Blocks))
	}
	b.fs.Release()
	if out := <-stuck; len(out.Failed) > 0 {
		t.Errorf("load from the root that hung failed after its release: %+v", out)
	}
	for _, c := range slices.Concat(well, hung) {
		testenv.NoError(t, b.checkPages(c.Index, c.Blocks))
	}
}

// A load that waits for a slot when the engine is closed fails, and what it was to read is kept.
func TestCloseBlamesNoPiece(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*8)
	b.storeChunks(8)
	l := b.lease(0, 1, 2, 3, 4, 5, 6, 7)
	defer l.Release()
	var rules []faultfs.Rule
	for i := range 4 { // as many as there are slots
		rules = append(rules, faultfs.MustRules("read **/"+filepath.Base(b.pieceOf(i))+": hang")...)
	}
	b.fs.Set(rules...)
	other, err := b.engine.Queue("other")
	testenv.OK(t, err)
	loads, first, second := b.spread(8), make(chan transfer.Outcome, 1), make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: loads[:4],
		Done: func(o transfer.Outcome) { first <- o }})
	testenv.OK(t, b.fs.AwaitHanging(testenv.Context(t), 4))
	other.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: loads[4:],
		Done: func(o transfer.Outcome) { second <- o }})
	closed := make(chan error, 1)
	go func() { closed <- b.engine.Close() }()
	if out := <-second; len(out.Failed) != 4 || !errors.Is(out.Failed[0].Err, transfer.ErrClosed) {
		t.Errorf("the store of a closed engine: got %+v, want 4 chunks failed with ErrClosed", out)
	}
	b.fs.Release()
	b.fs.Set()
	testenv.NoError(t, <-closed)
	<-first
	b.stillThere(4, 5, 6, 7)
}

// stillThere checks that no piece was given up.
func (b *bench) stillThere(chunks ...int) {
	b.t.Helper()
	l := b.lease(chunks...)
	defer l.Release()
	if l.Hits() != len(chunks) {
		b.t.Errorf("%d of %d entries are left", l.Hits(), len(chunks))
	}
}

// TestCancelNeedsNoDisk: the disk hangs under a load, whole or in a layer; the cancel completes it all the same, and what the disk gives
// later goes nowhere.
func TestCancelNeedsNoDisk(t *testing.T) {
	cancelNeedsNoDisk(t, nil)
	cancelNeedsNoDisk(t, &transfer.Layers{Landed: func(layer uint32, _ []int) { t.Errorf("layer %d landed", layer) }})
}

func cancelNeedsNoDisk(t *testing.T, by *transfer.Layers) {
	geo := kv.Uniform(2, 4, 1, 70000)
	b := newBench(t, geo, 6)
	b.storeChunks(3)
	b.fs.Set(faultfs.MustRules("read **/" + filepath.Base(b.pieceOf(1)) + ": hang")...)
	l := b.lease(0, 1, 2)
	defer l.Release()
	loads := b.spread(3)
	done := make(chan transfer.Outcome, 2)
	h := b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: loads, Layers: by,
		Done: func(o transfer.Outcome) { done <- o }})
	testenv.OK(t, b.fs.AwaitHanging(testenv.Context(t), 1))
	h.Cancel()
	<-h.Fenced()
	out := <-done
	cancelled := false
	for _, f := range out.Failed {
		if !errors.Is(f.Err, transfer.ErrCancelled) {
			t.Errorf("chunk %d: %v", f.Chunk, f.Err)
		}
		cancelled = cancelled || f.Chunk == 1
	}
	if !cancelled {
		t.Errorf("the hanging chunk is not among the failed: %+v", out)
	}
	b.poison() // the client uses its blocks for something else now
	b.fs.Release()
	b.fs.Set()
	testenv.OK(t, b.engine.Close()) // waits for the late read
	if err := b.checkUntouched([]uint32{0, 1, 2, 3, 4, 5}); err != nil {
		t.Errorf("after the fence: %v", err)
	}
	select {
	case o := <-done:
		t.Errorf("completed twice: %+v", o)
	default:
	}
}

// TestCancelOfAStoreGivesTheBlocksBack: pages that were read already may go on to the disk; the fence does not wait.
func TestCancelOfAStoreGivesTheBlocksBack(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, 6)
	b.fs.Set(faultfs.MustRules("write **: hang")...)
	read, published := make(chan transfer.Outcome, 2), make(chan transfer.Outcome, 2)
	var chunks []transfer.StoreChunk
	for n, ids := range [][]uint32{{0, 1}, {2, 3}, {4, 5}} {
		chunks = append(chunks, b.put(n, ids))
	}
	h := b.queue.Store(&transfer.StoreJob{
		Memory: b.memory, Chunks: chunks,
		Read: func(o transfer.Outcome) { read <- o }, Published: func(o transfer.Outcome) { published <- o },
	})
	testenv.OK(t, b.fs.AwaitHanging(testenv.Context(t), 1))
	h.Cancel()
	<-h.Fenced()
	first := <-read
	select {
	case o := <-published:
		t.Fatalf("published while the disk hangs: %+v", o)
	default:
	}
	b.poison()
	b.fs.Release()
	b.fs.Set()
	last := <-published
	if len(last.Failed) < len(first.Failed) {
		t.Errorf("%d chunks failed at the fence and %d in the end", len(first.Failed), len(last.Failed))
	}
	// Whatever was published holds the bytes from before the blocks were given back.
	l := b.lease(0, 1, 2)
	defer l.Release()
	loads := b.spread(3)[:l.Hits()]
	if out := b.load(l, loads, nil); len(out.Failed) > 0 {
		t.Fatal(out)
	}
	for n, c := range loads {
		testenv.NoError(t, b.checkPages(n, c.Blocks))
	}
}

func TestClosedEngineTakesNothing(t *testing.T) {
	geo := kv.Uniform(2, 1, 1, 4096)
	b := newBench(t, geo, 4)
	b.storeChunks(1)
	l := b.lease(0)
	defer l.Release()
	c := b.put(1, []uint32{0, 1})
	testenv.OK(t, b.engine.Close())
	if out := b.load(l, b.spread(1), nil); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, transfer.ErrClosed) {
		t.Errorf("load: %+v", out)
	}
	if read, out := b.storeAll(c); len(out.Failed) != 1 || len(read.Failed) != 1 ||
		!errors.Is(out.Failed[0].Err, transfer.ErrClosed) {
		t.Errorf("store: %+v %+v", read, out)
	}
	if _, err := b.engine.Queue("other"); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("queue: %v", err)
	}
	if st := b.store.Stats().Roots[0]; st.Writing != 0 {
		t.Errorf("%d bytes are still being written", st.Writing)
	}
}

func TestLoadAfterReleaseFails(t *testing.T) {
	geo := kv.Uniform(2, 1, 1, 4096)
	b := newBench(t, geo, 4)
	b.storeChunks(1)
	l := b.lease(0)
	l.Release()
	out := b.load(l, b.spread(1), nil)
	if len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, store.ErrLeaseOver) {
		t.Errorf("load of a lease that is over: got %+v, want 1 chunk failed with ErrLeaseOver", out)
	}
}

func TestEmptyJobsComplete(t *testing.T) {
	b := newBench(t, kv.Uniform(1, 1, 1, 64), 1)
	l := b.lease()
	defer l.Release()
	if out := b.load(l, nil, nil); len(out.Failed) > 0 {
		t.Error(out)
	}
	if read, out := b.storeAll(); len(read.Failed)+len(out.Failed) > 0 {
		t.Error(read, out)
	}
}
