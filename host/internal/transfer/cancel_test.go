package transfer_test

import (
	"context"
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// TestCancelNeedsNoDisk: the disk hangs under a load; the cancel completes it all the same, and what the disk gives
// later goes nowhere.
func TestCancelNeedsNoDisk(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, 6)
	b.storeChunks(3)
	b.fs.Set(faultfs.MustRules("read " + b.pieceOf(1) + ": hang")...)
	l := b.lease(0, 1, 2)
	defer l.Release()
	loads := b.spread(3)
	done := make(chan transfer.Outcome, 2)
	h := b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: loads,
		Done: func(o transfer.Outcome) { done <- o }})
	testenv.OK(t, b.fs.AwaitHanging(context.Background(), 1))
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
	if err := b.engine.Close(); err != nil { // waits for the late read
		t.Fatal(err)
	}
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
	testenv.OK(t, b.fs.AwaitHanging(context.Background(), 1))
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
