package moves

import (
	"context"
	"sync/atomic"
	"testing"
)

// task is a move that waits until it may end.
type task struct {
	bytes int64
	begun chan struct{}
	end   chan struct{}
	run   *atomic.Int64
	shed  *atomic.Int64

	yields, cancelled bool
}

func (v *task) Bytes() int64    { return v.bytes }
func (v *task) Shed()           { v.shed.Add(1) }
func (v *task) Yields() bool    { return v.yields }
func (v *task) Cancelled() bool { return v.cancelled }
func (v *task) Run(context.Context, *Copier) {
	v.begun <- struct{}{}
	<-v.end
	v.run.Add(1)
}

// TestMoverIsBounded: what waits is bounded in bytes, what is more is refused at once, and what still waits at the end
// is told.
func TestMoverIsBounded(t *testing.T) {
	m, err := New(Config{Workers: 1, Waiting: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	begun, end := make(chan struct{}), make(chan struct{})
	var run, shed atomic.Int64
	next := func(bytes int64) bool {
		return m.Offer(&task{bytes: bytes, begun: begun, end: end, run: &run, shed: &shed})
	}
	if !next(100) {
		t.Fatal("a mover with nothing to do refused a move")
	}
	<-begun
	for i, want := range []bool{true, true, false, true} {
		if got := next([]int64{4, 4, 4, 2}[i]); got != want {
			t.Errorf("move %d: got %v, want %v", i, got, want)
		}
	}
	if n, bytes := m.InFlight(); n != 4 || bytes != 10 {
		t.Errorf("%d moves and %d bytes in flight", n, bytes)
	}
	end <- struct{}{}
	<-begun
	m.close() // as when the context is done
	end <- struct{}{}
	cancel()
	<-done
	if run.Load() != 2 || shed.Load() != 2 || next(1) {
		t.Errorf("%d moves were run and %d told that they were not", run.Load(), shed.Load())
	}
}

// TestPrefetchesAreShedFirst: a move that does not fit takes the place of the last prefetch that waits, a prefetch
// takes nobody's, and what is cancelled while it waits goes at once.
func TestPrefetchesAreShedFirst(t *testing.T) {
	m, err := New(Config{Workers: 1, Waiting: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var run, shed, shedPrefetches atomic.Int64
	move := func(bytes int64) *task { return &task{bytes: bytes, run: &run, shed: &shed} }
	prefetch := func(bytes int64) *task { return &task{bytes: bytes, run: &run, shed: &shedPrefetches, yields: true} }
	for i, v := range []*task{prefetch(3), move(4), prefetch(3)} {
		if !m.Offer(v) {
			t.Fatalf("move %d was refused", i)
		}
	}
	if m.Offer(prefetch(1)) {
		t.Error("a prefetch was queued where no more may wait")
	}
	if !m.Offer(move(2)) || shedPrefetches.Load() != 1 || shed.Load() != 0 {
		t.Errorf("%d prefetches and %d others were shed for a move", shedPrefetches.Load(), shed.Load())
	}
	if n, bytes := m.InFlight(); n != 3 || bytes != 9 || m.yielding != 1 {
		t.Errorf("%d moves and %d bytes in flight, %d yield", n, bytes, m.yielding)
	}
	late := prefetch(1)
	if !m.Offer(late) {
		t.Error("a prefetch that fits was refused")
	}
	late.cancelled = true
	m.Prune()
	if n, bytes := m.InFlight(); n != 3 || bytes != 9 || m.yielding != 1 || shedPrefetches.Load() != 2 {
		t.Errorf("%d moves and %d bytes in flight, %d yield, %d were shed", n, bytes, m.yielding, shedPrefetches.Load())
	}
}
