package transfer_test

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// A load that waits for a slot when the engine is closed fails, and what it was to read is kept.
func TestCloseBlamesNoPiece(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*8)
	b.storeChunks(8)
	l := b.lease(0, 1, 2, 3, 4, 5, 6, 7)
	defer l.Release()
	var rules []faultfs.Rule
	for i := range 4 { // as many as there are slots
		rules = append(rules, faultfs.MustRules("read "+b.pieceOf(i)+": hang")...)
	}
	b.fs.Set(rules...)
	other, err := b.engine.Queue("other")
	testenv.OK(t, err)
	loads, first, second := b.spread(8), make(chan transfer.Outcome, 1), make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: loads[:4],
		Done: func(o transfer.Outcome) { first <- o }})
	testenv.OK(t, b.fs.AwaitHanging(t.Context(), 4))
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
