package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestDamageIsNotServed: payload, header, size, namespace and key of a piece are verified.
func TestDamageIsNotServed(t *testing.T) {
	geo := kv.Uniform(8, 6, 1, 40000)
	b := newBench(t, geo, geo.Blocks*4)
	b.storeChunks(4)
	transfer.ChangeByte(t, b.pieceOf(0), 8192, 0x10)
	transfer.ChangeByte(t, b.pieceOf(1), 100, 0x10) // header
	testenv.OK(t, os.Truncate(b.pieceOf(2), 1<<20))
	three, err := os.ReadFile(b.pieceOf(3))
	testenv.OK(t, err)
	other := newBench(t, geo, geo.Blocks)
	other.storeChunks(1)
	if err := os.WriteFile(other.pieceOf(0), three, 0o600); err != nil { // another key's, sound in itself
		t.Fatal(err)
	}
	l := b.lease(0, 1, 2)
	defer l.Release()
	b.poison()
	loads := b.spread(3)
	out := b.load(l, loads, nil)
	var failed []int
	for _, f := range out.Failed {
		failed = append(failed, f.Chunk)
	}
	slices.Sort(failed)
	if !slices.Equal(failed, []int{0, 1, 2}) {
		t.Errorf("failed: %+v", out.Failed)
	}
	if err := b.checkPages(0, loads[0].Blocks); err == nil {
		t.Error("the damaged payload was served")
	}
	for _, n := range []int{1, 2} {
		testenv.NoError(t, b.checkUntouched(loads[n].Blocks))
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
	l = b.lease(3)
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
