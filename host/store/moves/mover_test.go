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
}

func (v *task) Bytes() int64 { return v.bytes }
func (v *task) Shed()        { v.shed.Add(1) }
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
	next := func(bytes int64) bool { return m.Offer(&task{bytes, begun, end, &run, &shed}) }
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
