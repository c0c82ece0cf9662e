package moves

import (
	"cmp"
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// task is a move that waits until it may end.
type task struct {
	bytes int64
	begun chan struct{}
	end   chan struct{}
	run   *atomic.Int64
	shed  *atomic.Int64

	level int
	value float64 // 0: 1
}

func (v *task) Bytes() int64    { return v.bytes }
func (v *task) Level() int      { return v.level }
func (v *task) Shed()           { v.shed.Add(1) }
func (v *task) Cancelled() bool { return false }
func (v *task) Value() float64  { return cmp.Or(v.value, 1) }
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

// slowest is a mover's configuration with which so many bytes may wait until a move has shown how fast they are copied.
func slowest(bytes int64) Config {
	return Config{Workers: 1, Waiting: time.Duration(float64(bytes) / assumedSpeed * float64(time.Second))}
}

// TestMoverIsBounded: what waits is bounded, what is more is refused at once, and what still waits at the end is told.
func TestMoverIsBounded(t *testing.T) {
	m, stop := started(t, slowest(10<<20))
	begun, end := make(chan struct{}), make(chan struct{})
	var run, shed atomic.Int64
	next := func(bytes int64) bool {
		return m.Offer(&task{bytes: bytes << 20, begun: begun, end: end, run: &run, shed: &shed})
	}
	if !next(100) {
		t.Fatal("a mover with nothing to do refused a move")
	}
	<-begun
	for i, want := range []bool{true, true, false, true} {
		if got := next([]int64{4, 4, 4, 1}[i]); got != want {
			t.Errorf("move %d: got %v, want %v", i, got, want)
		}
	}
	if n, bytes := m.InFlight(); n != 4 || bytes != 9<<20 {
		t.Errorf("%d moves and %d bytes in flight, want 4 and %d", n, bytes, 9<<20)
	}
	end <- struct{}{}
	<-begun
	m.close() // as when the context is done
	end <- struct{}{}
	stop()
	if run.Load() != 2 || shed.Load() != 2 || next(1) {
		t.Errorf("%d moves were run and %d told that they were not, want 2 and 2", run.Load(), shed.Load())
	}
}

// TestMostValuableFirst: what is worth most is run first, and among equals what has waited longest. Where not all can wait, what is worth
// least is shed, and a move that becomes worth more is not.
func TestMostValuableFirst(t *testing.T) {
	m, stop := started(t, slowest(4<<20))
	begun, end := make(chan struct{}), make(chan struct{})
	var run, shed [6]atomic.Int64
	var of [6]*task
	offer := func(n int, value float64) bool {
		of[n] = &task{bytes: 1 << 20, value: value, begun: begun, end: end, run: &run[n], shed: &shed[n]}
		return m.Offer(of[n])
	}
	offer(0, 1)
	<-begun
	for n, value := range []float64{0, 0.5, 4, 0.5, 1} {
		if n > 0 && !offer(n, value) {
			t.Errorf("move %d is refused, want it to wait", n)
		}
	}
	m.mu.Lock()
	of[1].value = 16
	m.mu.Unlock()
	m.Changed(of[1])
	if !offer(5, 2) || shed[3].Load() != 1 {
		t.Errorf("%d moves of the least value are shed for one of a greater, want 1", shed[3].Load())
	}
	late := &task{bytes: 1 << 20, value: 0.5, run: &run[3], shed: &shed[3]}
	if m.Offer(late) {
		t.Error("a move waits that is worth less than all others, want it to be refused")
	}
	end <- struct{}{}
	for _, n := range []int{1, 2, 5, 4} {
		<-begun
		end <- struct{}{}
		await(&run[n])
	}
	stop()
	if shed[3].Load() != 1 {
		t.Errorf("%d moves are shed, want 1", shed[3].Load())
	}
}

// await spins until a move has run.
func await(run *atomic.Int64) {
	for run.Load() == 0 {
		runtime.Gosched()
	}
}

// TestWaitingIsTime: how much may wait follows from how fast moves are made.
func TestWaitingIsTime(t *testing.T) {
	l := lane{}
	for range 200 {
		l.ran(1<<20, 0.5)
	}
	if got := l.speed(assumedSpeed); got < 2<<20-1 || got > 2<<20+1 {
		t.Errorf("the speed is %.0f bytes per second, want %d", got, 2<<20)
	}
	for range 200 {
		l.ran(1<<20, 0.125)
	}
	if got := l.speed(assumedSpeed); got < 7.9*(1<<20) {
		t.Errorf("the speed of late is %.0f bytes per second, want %d", got, 8<<20)
	}
}

// TestLevelThatStalls: moves of a level that does not answer hold its workers, and fill its bound, and those of another level run.
func TestLevelThatStalls(t *testing.T) {
	c := slowest(10 << 20)
	c.Levels = []int{1}
	m, stop := started(t, c)
	begun, end := make(chan struct{}), make(chan struct{})
	var run, shed atomic.Int64
	stalled := func() bool {
		return m.Offer(&task{bytes: 10 << 20, level: 1, begun: begun, end: end, run: &run, shed: &shed})
	}
	stalled()
	<-begun
	if first, second := stalled(), stalled(); !first || second {
		t.Errorf("moves that wait for the stalled level were taken: %v, %v, want one of them", first, second)
	}
	for range 4 {
		other := &task{bytes: 10 << 20, begun: make(chan struct{}), end: make(chan struct{}), run: &run, shed: &shed}
		if !m.Offer(other) {
			t.Fatal("a move of another level was refused")
		}
		<-other.begun
		close(other.end)
	}
	if n, bytes := m.InFlight(); n < 2 || bytes != 10<<20 { // the others may not have ended yet
		t.Errorf("%d moves and %d bytes in flight, want the two of the stalled level", n, bytes)
	}
	close(end)
	<-begun
	stop()
}

// stubborn is a move that always wants to be run again.
type stubborn struct {
	runs, shed atomic.Int64
	gone       atomic.Bool
}

func (v *stubborn) Bytes() int64                      { return 1 }
func (v *stubborn) Level() int                        { return 0 }
func (v *stubborn) Value() float64                    { return 1 }
func (v *stubborn) Cancelled() bool                   { return v.gone.Load() }
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
		if n, bytes := m.InFlight(); n != 0 || bytes != 0 {
			t.Errorf("%d moves and %d bytes are in flight after both have ended, want none", n, bytes)
		}
		stop()
		if v.runs.Load() != 2 || v.shed.Load() != 1 {
			t.Errorf("run %d times and shed %d times, want 2 and 1", v.runs.Load(), v.shed.Load())
		}
	})
}

// TestPruneOfAMoveThatWaitsAgain: a move that waits for another is shed once it is no longer wanted.
func TestPruneOfAMoveThatWaitsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, stop := started(t, Config{Workers: 2})
		begun, end := make(chan struct{}), make(chan struct{})
		var run, shed atomic.Int64
		m.Offer(&task{bytes: 1, begun: begun, end: end, run: &run, shed: &shed})
		<-begun
		var v stubborn
		m.Offer(&v)
		synctest.Wait()
		if m.Prune(); v.shed.Load() != 0 {
			t.Error("a move that is wanted is shed")
		}
		v.gone.Store(true)
		m.Prune()
		if n, bytes := m.InFlight(); v.shed.Load() != 1 || n != 1 || bytes != 0 {
			t.Errorf("it is shed %d times, and %d moves and %d bytes are in flight, want 1, and the other move", v.shed.Load(), n, bytes)
		}
		end <- struct{}{}
		must(t, m.Settle(t.Context(), func() {}))
		stop()
		if v.runs.Load() != 1 || v.shed.Load() != 1 || run.Load() != 1 || shed.Load() != 0 {
			t.Errorf("it ran %d times and is shed %d times, want once each", v.runs.Load(), v.shed.Load())
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
var must = testenv.OK
