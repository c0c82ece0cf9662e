package staging

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestWorkersTurns fills both queues of one held worker and looks at the order that the tasks run in.
func TestWorkersTurns(t *testing.T) {
	for _, c := range []struct {
		ratio         float64
		reads, writes int
		want          string
	}{
		{0.75, 9, 4, "WRRRWRRRWRRRW"},
		{0.5, 4, 4, "WRWRWRWR"},
		{0.25, 2, 6, "WWWRWWWR"},
		{1, 3, 3, "RRRWWW"},
		{0, 3, 3, "WWWRRR"},
		{7, 1, 1, "RW"},
		{-1, 1, 1, "WR"},
		{0.75, 0, 3, "WWW"},
		{0.25, 3, 0, "RRR"},
	} {
		w := NewWorkers(0, c.ratio) // of which one is made
		hold := make(chan struct{})
		var order strings.Builder
		submit(t, w, Read, func() { <-hold })
		until(func() bool { return w.Stats().Running == 1 })
		for range c.reads {
			submit(t, w, Read, func() { order.WriteByte('R') })
		}
		for range c.writes {
			submit(t, w, Write, func() { order.WriteByte('W') })
		}
		if s, err := w.Stats(), w.SubmitTo("", 0, Kind(2), 0, func() {}); s.QueuedRead != c.reads || s.QueuedWrite != c.writes || s.Workers != 1 || err == nil {
			t.Errorf("%+v queued: %+v, and a task of no kind: error %v, want one", c, s, err)
		}
		close(hold)
		w.Close()
		if order.String() != c.want {
			t.Errorf("ratio %v: %s, want %s", c.ratio, &order, c.want)
		}
		if s := w.Stats(); s.DoneRead != uint64(c.reads)+1 || s.DoneWrite != uint64(c.writes) || s.Running != 0 {
			t.Errorf("%+v done: %+v", c, s)
		}
	}
}

func submit(t testing.TB, w *Workers, kind Kind, task func()) {
	t.Helper()
	must(t, w.SubmitTo("", 0, kind, 0, task))
}

func TestWorkersClose(t *testing.T) {
	before := runtime.NumGoroutine()
	w := NewWorkers(3, 0.75)
	hold := make(chan struct{})
	var ran atomic.Int32
	for range 3 {
		submit(t, w, Write, func() { <-hold; ran.Add(1) })
	}
	for range 10 {
		submit(t, w, Read, func() { ran.Add(1) })
	}
	until(func() bool { return w.Stats().Running == 3 })
	go w.Close()
	until(func() bool { return errors.Is(w.SubmitTo("", 0, Read, 0, func() {}), ErrClosed) })
	if s := w.Stats(); s.Running != 3 || s.Workers != 3 {
		t.Fatalf("%d of %d workers run, want 3 of 3", s.Running, s.Workers)
	}
	close(hold)
	w.Close()
	w.Close()
	if ran.Load() != 13 {
		t.Fatalf("%d of 13 tasks ran", ran.Load())
	}
	until(func() bool { return runtime.NumGoroutine() <= before })
}

func TestWorkersPanic(t *testing.T) {
	w := NewWorkers(1, 0.75)
	type told struct {
		value any
		stack string
	}
	got := make(chan told, 1)
	w.OnPanic(func(v any, stack []byte) { got <- told{v, string(stack)} })
	submit(t, w, Write, func() { explode() })
	p := <-got
	if p.value != "boom" || !strings.Contains(p.stack, "explode") {
		t.Fatalf("told %v\n%s", p.value, p.stack)
	}
	submit(t, w, Write, runtime.Goexit) // as a test's FailNow would
	done := make(chan struct{})
	submit(t, w, Read, func() { close(done) })
	<-done
	w.Close()
	if s := w.Stats(); s.Panics != 1 || s.DoneWrite != 2 || s.DoneRead != 1 || s.Running != 0 {
		t.Fatalf("after a panic: %+v, want it counted and all tasks done", s)
	}
}

func explode() { panic("boom") }

// TestWorkersHammer submits from many goroutines, tasks among them, while the pool closes: what was taken ran once.
func TestWorkersHammer(t *testing.T) {
	for range 20 {
		w := NewWorkers(4, 0.75)
		var taken, ran atomic.Int64
		var wg sync.WaitGroup
		task := func() { ran.Add(1) }
		nested := func() {
			ran.Add(1)
			if w.SubmitTo("", 0, Read, 0, task) == nil {
				taken.Add(1)
			}
		}
		start := make(chan struct{})
		for g := range 8 {
			wg.Go(func() {
				<-start
				for i := range 300 {
					f := task
					if i%7 == 0 {
						f = nested
					}
					err := w.SubmitTo("", 0, Kind((i+g)%2), 0, f)
					if err == nil {
						taken.Add(1)
					} else if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					w.Stats()
				}
			})
		}
		close(start)
		runtime.Gosched()
		w.Close()
		wg.Wait()
		if taken.Load() != ran.Load() {
			t.Fatalf("%d taken, %d ran", taken.Load(), ran.Load())
		}
	}
}

// TestLanes has the tasks of one lane hang: those of another are run all the same, and the rest of the first when that
// goes on. With one lane the whole pool is its own.
func TestLanes(t *testing.T) {
	for _, c := range []struct{ workers, lanes, hung int }{{8, 1, 8}, {8, 2, 6}, {16, 3, 12}, {2, 2, 1}} {
		w := NewWorkers(c.workers, 0.75)
		w.Lanes(c.lanes)
		hold := make(chan struct{})
		var begun atomic.Int32
		for n := range 3 * c.workers {
			must(t, w.SubmitTo("hung", 0, Kind(n%2), 0, func() { begun.Add(1); <-hold }))
		}
		if c.lanes > 1 {
			done := make(chan struct{})
			for n := range 100 {
				must(t, w.SubmitTo("well", 0, Kind(n%2), 0, func() { done <- struct{}{} }))
			}
			for range 100 {
				<-done
			}
		}
		until(func() bool { return w.Stats().Running == c.hung && begun.Load() == int32(c.hung) })
		wait := 3*c.workers - c.hung
		if l := w.Stats().Lanes[0]; l.Name != "hung" || l.Running != c.hung || l.QueuedRead+l.QueuedWrite != wait || l.QueuedRead > wait/2+1 || l.QueuedWrite > wait {
			t.Errorf("%+v: the lane that hangs is %+v, want %d running and %d queued", c, l, c.hung, wait)
		}
		close(hold)
		w.Close()
		if got := begun.Load(); got != int32(3*c.workers) {
			t.Errorf("%+v: %d tasks ran, want %d", c, got, 3*c.workers)
		}
	}
}

// TestTenantsTakeTurns: a tenant's task is the next one, however many another has queued, and a tenant that is not alone has
// no more than half of the workers, in one lane of several no more than half of what a lane has, and no more than half of the
// processors while its tasks compute.
func TestTenantsTakeTurns(t *testing.T) {
	w := NewWorkers(1, 0.75)
	defer w.Close()
	hold, ran := make(chan struct{}), make(chan uint32, 400)
	must(t, w.SubmitTo("", 9, Read, 0, func() { <-hold }))
	for n := range uint32(303) {
		tenant := n / 100 // of the last one there are 3
		must(t, w.SubmitTo(string(rune('a'+n%2)), tenant, Kind(n%2), 0, func() { ran <- tenant }))
	}
	close(hold)
	for n := range 303 {
		if <-ran == 3 && n > 30 {
			t.Errorf("one of 3 tasks behind 300 of three other tenants runs at place %d, want it among the first 30", n)
		}
	}

	for _, c := range []struct {
		beside, lanes, mounts int
		slow                  float64
		want                  int
	}{{3, 1, 1, 0, 4}, {3, 3, 1, 0, 5}, {100, 1, 1, 0, 5}, {3, 1, 1, 0.75, 4}, {3, 1, 1, 0.76, 5}, {3, 1, 2, 1, 4}, {100, 3, 2, 0, 5}} {
		wide := NewWorkers(8, 0.75)
		wide.Lanes(c.mounts)
		wide.mu.Lock()
		wide.beside = c.beside
		for n := range c.lanes {
			wide.lane(string(rune('a'+n)), 2).slow = c.slow
		}
		wide.mu.Unlock()
		hold := make(chan struct{})
		must(t, wide.SubmitTo("", 1, Read, 0, func() { <-hold }))
		for n := range 21 {
			must(t, wide.SubmitTo(string(rune('a'+n%c.lanes)), 2, Read, 0, func() { <-hold }))
		}
		until(func() bool { return wide.Stats().Running >= c.want })
		must(t, wide.SubmitTo("", 3, Write, 0, func() {}))
		until(func() bool { return wide.Stats().DoneWrite == 1 })
		if n := wide.Stats().Running; n > c.want {
			t.Errorf("%+v: %d tasks run, of tenant 1 and of tenant 2 in some lanes, want 1 and %d of 8", c, n, c.want-1)
		}
		close(hold)
		wide.Close()
	}
}

// TestSlowTasksWait: tasks that take longer than their bytes can, most of the last ones.
func TestSlowTasksWait(t *testing.T) {
	w := NewWorkers(1, 0.75)
	for n, bytes := range []int64{0, 1 << 40} {
		for range 16 {
			must(t, w.SubmitTo("", uint32(n), Read, bytes, func() { time.Sleep(slowTask) }))
		}
	}
	w.Close()
	for tenant, want := range []bool{true, false} {
		if l := w.lane("", uint32(tenant)); l.waits() != want {
			t.Errorf("tenant %d: %v of its tasks were slow, want that most were: %t", tenant, l.slow, want)
		}
	}
}

func TestTurnsThatNobodyWaitsForAreFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := NewTurns(1)
		must(t, turns.Take(t.Context(), 9))
		ctx, cancel := context.WithCancel(t.Context())
		for _, tenant := range []uint32{4, 4, 0} {
			go func() {
				if err := turns.Take(ctx, tenant); err != context.Canceled {
					t.Errorf("tenant %d: error %v, want %v", tenant, err, context.Canceled)
				}
			}()
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		turns.Give()
		must(t, turns.Take(t.Context(), 4))
	})
}

// must ends a test that cannot go on without what failed.
var must = testenv.OK
