package arrivals

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestQueue: members that always wait have equal times, however long each use takes. One that comes now and then is among the next, until it has
// had as much as the others since.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := Queue{Most: 2}
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Second)
		defer stop()
		use := func(who string, takes time.Duration) (waited time.Duration) {
			since := time.Now()
			if q.Enter(ctx, who) != nil {
				return 0
			}
			waited = time.Since(since)
			time.Sleep(takes)
			q.Leave(who, takes)
			return waited
		}
		var mu sync.Mutex
		var had [16]time.Duration
		var work sync.WaitGroup
		for n := range had {
			takes := time.Duration(1+n%4) * time.Millisecond
			work.Go(func() {
				for ctx.Err() == nil {
					use(fmt.Sprint(n), takes)
					mu.Lock()
					had[n] += takes
					mu.Unlock()
				}
			})
		}
		for range 100 {
			time.Sleep(15 * time.Millisecond)
			if d := use("seldom", time.Millisecond); d > 8*time.Millisecond {
				t.Errorf("one that seldom comes has waited %s, want at most two uses of 4 ms", d)
			}
		}
		work.Wait()
		for n, d := range had {
			if d < 230*time.Millisecond || d > 260*time.Millisecond {
				t.Errorf("member %d has had %s of 4 s, want about a sixteenth of what the seldom one has left", n, d)
			}
		}
	})
}

// TestQueueOfNewNames: a member that has used the queue is let through among others that come under a new name each time.
func TestQueueOfNewNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const others, turns = 5, 2000
		var q Queue
		had := 0
		var over atomic.Bool
		var work sync.WaitGroup
		work.Go(func() {
			for !over.Load() {
				testenv.OK(t, q.Enter(t.Context(), "old"))
				time.Sleep(time.Millisecond)
				had++
				q.Leave("old", time.Millisecond)
			}
		})
		for n := range others {
			work.Go(func() {
				for k := range turns / others {
					name := fmt.Sprint(n, " ", k)
					testenv.OK(t, q.Enter(t.Context(), name))
					time.Sleep(time.Millisecond)
					q.Leave(name, time.Millisecond)
				}
				over.Store(true)
			})
		}
		work.Wait()
		if want := turns / (mostPassed*(others+1) + 1); had < want {
			t.Errorf("it has had %d turns among %d of new names, want at least %d", had, turns, want)
		}
	})
}

// TestQueueForgets: a member that leaves while it waits is not let through, and of those that come only once none is kept.
func TestQueueForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		testenv.OK(t, q.Enter(t.Context(), "user"))
		ctx, stop := context.WithCancel(t.Context())
		left := make(chan error)
		go func() { left <- q.Enter(ctx, "leaver") }()
		synctest.Wait()
		if !q.Waits() {
			t.Error("a member does not wait while another is let through")
		}
		stop()
		if err := <-left; !errors.Is(err, context.Canceled) || q.Waits() {
			t.Errorf("one that has left: error %v, it waits: %t", err, q.Waits())
		}
		for n := range 3 * mostAway { // one is always let through
			go func() { left <- q.Enter(t.Context(), fmt.Sprint(n)) }()
			synctest.Wait()
			q.Leave(map[bool]string{true: "user", false: fmt.Sprint(n - 1)}[n == 0], time.Millisecond)
			testenv.OK(t, <-left)
			if len(q.of) > mostAway+2 {
				t.Fatalf("%d members are known, of which one is here", len(q.of))
			}
		}
		if q.Leave(fmt.Sprint(3*mostAway-1), time.Millisecond); len(q.of) != 0 || q.users != 0 {
			t.Errorf("%d members and %d users are known after all", len(q.of), q.users)
		}
	})
}
