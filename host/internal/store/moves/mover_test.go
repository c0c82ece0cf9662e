package moves

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// task is a move that waits until it may end.
type task struct {
	bytes int64
	begun chan struct{}
	end   chan struct{}
	run   *atomic.Int64
	shed  *atomic.Int64

	leaves bool
	level  int
}

func (v *task) Bytes() int64    { return v.bytes }
func (v *task) Level() int      { return v.level }
func (v *task) Shed()           { v.shed.Add(1) }
func (v *task) Yields() bool    { return false }
func (v *task) Cancelled() bool { return false }
func (v *task) Leaves() bool    { return v.leaves }
func (v *task) Run(context.Context, *Copier) bool {
	v.begun <- struct{}{}
	<-v.end
	v.run.Add(1)
	return false
}

// started is a mover of moves of level 0 that runs. end ends it and waits until it has ended.
func started(t *testing.T, c Config) (m *Mover, end func()) {
	t.Helper()
	c.Levels = append(c.Levels, 0)
	m, err := New(c)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	return m, func() { cancel(); <-done }
}

// TestMoverIsBounded: what waits is bounded in bytes, what is more is refused at once, and what still waits at the end
// is told.
func TestMoverIsBounded(t *testing.T) {
	m, stop := started(t, Config{Workers: 1, Waiting: 10})
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
	if n, bytes := m.InFlight(); n != 4 || bytes != 10 || m.room(0) != 0 {
		t.Errorf("%d moves and %d bytes in flight, and room for %d bytes", n, bytes, m.room(0))
	}
	if !m.Offer(&task{bytes: 1, begun: begun, end: end, run: &run, shed: &shed, leaves: true}) { // it was given room before
		t.Error("an entry that leaves was refused")
	}
	end <- struct{}{}
	<-begun
	m.close() // as when the context is done
	end <- struct{}{}
	stop()
	if run.Load() != 2 || shed.Load() != 3 || next(1) {
		t.Errorf("%d moves were run and %d told that they were not", run.Load(), shed.Load())
	}
}

// TestLevelThatStalls: moves of a level that does not answer hold its workers, and fill its bound, and those of another level run.
func TestLevelThatStalls(t *testing.T) {
	m, stop := started(t, Config{Workers: 2, Waiting: 10, Levels: []int{1}})
	begun, end := make(chan struct{}), make(chan struct{})
	var run, shed atomic.Int64
	stalled := func() bool {
		return m.Offer(&task{bytes: 10, level: 1, begun: begun, end: end, run: &run, shed: &shed})
	}
	for range 2 {
		stalled()
		<-begun
	}
	if first, second := stalled(), stalled(); !first || second {
		t.Errorf("moves that wait for the stalled level were taken: %v, %v, want one of them", first, second)
	}
	for range 4 {
		other := &task{bytes: 10, begun: make(chan struct{}), end: make(chan struct{}), run: &run, shed: &shed}
		if !m.Offer(other) {
			t.Fatal("a move of another level was refused")
		}
		<-other.begun
		close(other.end)
	}
	if n, bytes := m.InFlight(); n < 3 || bytes != 10 { // the others may not have ended yet
		t.Errorf("%d moves and %d bytes in flight, want the three of the stalled level", n, bytes)
	}
	close(end)
	<-begun
	stop()
}

// stubborn is a move that always wants to be run again.
type stubborn struct{ runs, shed atomic.Int64 }

func (v *stubborn) Bytes() int64                      { return 1 }
func (v *stubborn) Level() int                        { return 0 }
func (v *stubborn) Leaves() bool                      { return false }
func (v *stubborn) Yields() bool                      { return false }
func (v *stubborn) Cancelled() bool                   { return false }
func (v *stubborn) Shed()                             { v.shed.Add(1) }
func (v *stubborn) Run(context.Context, *Copier) bool { v.runs.Add(1); return true }

// TestMoveAgain: a move that found no room is run again when another has ended, and is shed when none is under way that
// could make room.
func TestMoveAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stop := started(t, Config{Workers: 2})
		begun, end := make(chan struct{}), make(chan struct{})
		var run, shed atomic.Int64
		other := &task{bytes: 1, begun: begun, end: end, run: &run, shed: &shed}
		var v stubborn
		m.Offer(other)
		<-begun
		m.Offer(&v)
		synctest.Wait()
		if n, bytes := m.InFlight(); v.runs.Load() != 1 || v.shed.Load() != 0 || n != 2 || bytes != 1 {
			t.Errorf("run %d times and shed %d times beside another move; %d moves and %d bytes are in flight",
				v.runs.Load(), v.shed.Load(), n, bytes)
		}
		end <- struct{}{}
		must(t, m.Settle(t.Context(), func() {}))
		stop()
		if v.runs.Load() != 2 || v.shed.Load() != 1 {
			t.Errorf("run %d times and shed %d times, want 2 and 1", v.runs.Load(), v.shed.Load())
		}
	})
}

// late is a move that finds no room, and says so only after the move that made room has ended.
type late struct {
	stubborn
	between func()
}

func (v *late) Run(context.Context, *Copier) bool {
	if v.runs.Add(1) > 1 {
		return false
	}
	v.between()
	return true
}

// TestMoveThatEndedMeanwhile: a move that waits for another is run again although the other has ended before it says so.
func TestMoveThatEndedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stop := started(t, Config{Workers: 2})
		var run, shed atomic.Int64
		other := &task{bytes: 1, begun: make(chan struct{}), end: make(chan struct{}), run: &run, shed: &shed}
		v := &late{between: func() {
			m.Offer(other)
			<-other.begun
			other.end <- struct{}{}
			synctest.Wait()
		}}
		m.Offer(v)
		must(t, m.Settle(t.Context(), func() {}))
		if runs, n := v.runs.Load(), v.shed.Load(); runs != 2 || n != 0 || run.Load() != 1 {
			t.Errorf("it ran %d times and was shed %d times, the other ran %d times", runs, n, run.Load())
		}
		stop()
	})
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
