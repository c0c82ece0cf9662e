package arrivals

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestEffort: what a sender sends takes its part of the processors, however many connections it has; a crowd has twice as much together,
// however many it is, and each of it has a turn. What does not wait is remembered for a second at most, and is not the crowd's debt.
func TestEffort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := Effort{Part: 0.125}
		const took = 100 * time.Microsecond
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		var lines sync.WaitGroup
		var sent [3]atomic.Int64 // of a peer, of one stranger, of 16 others
		for n := range 90 {
			who, of := Sender{ID: "peer"}, 0
			switch {
			case n >= 8 && n < 10:
				who, of = Sender{"stranger", "strangers"}, 1
			case n >= 10:
				who, of = Sender{fmt.Sprint(n % 16), "strangers"}, 2
			}
			lines.Go(func() {
				for ctx.Err() == nil {
					e.Spend(ctx, who, took)
					sent[of].Add(1)
				}
			})
		}
		for range 40 {
			time.Sleep(20 * time.Millisecond)
			since := time.Now()
			e.Spend(ctx, Sender{"seldom", "strangers"}, took)
			if d := time.Since(since); d > 2*took*4 {
				t.Errorf("one of the crowd that seldom sends has waited %s, want at most twice %s", d, took*4)
			}
		}
		lines.Wait()
		if p, s, o := sent[0].Load(), sent[1].Load(), sent[2].Load(); p < 1250 || p > 1275 || s < 140 || s > 170 || s+o < 2500 || s+o > 2650 {
			t.Errorf("%d of a peer, %d of a stranger and %d of 16 others, want 1250, 147 and 2353", p, s, o)
		}
		time.Sleep(10 * time.Second)
		since := time.Now()
		for range 6 {
			e.Spend(t.Context(), Sender{"stranger", "strangers"}, took)
		}
		if d := time.Since(since); d != 0 {
			t.Errorf("a few calls have waited %s, want that they do not", d)
		}
		over, stop := context.WithCancel(t.Context())
		stop()
		for range 100 {
			e.Spend(over, Sender{"leaver", "strangers"}, took*100)
		}
		if d := e.Spend(over, Sender{"leaver", "strangers"}, 0); d != mostDebt {
			t.Errorf("one that does not wait is %s ahead, want %s", d, mostDebt)
		}
		if d := e.Spend(t.Context(), Sender{"another", "strangers"}, 0); d > effortSlack {
			t.Errorf("another of the crowd has waited %s for one that does not, want that it does not", d)
		}
		time.Sleep(time.Minute)
		for n := range 10 * fewSenders {
			e.Spend(t.Context(), Sender{ID: fmt.Sprint(n)}, took)
			time.Sleep(time.Second)
		}
		if len(e.of) > fewSenders+1 {
			t.Errorf("%d senders are known after all is made up for, want %d at most", len(e.of), fewSenders+1)
		}
	})
}

// TestDialed: a client charges frames that do not follow from its own, and small ones of data, to the server.
func TestDialed(t *testing.T) {
	over, stop := context.WithCancel(t.Context())
	stop()
	const one = frameTime
	for what, c := range map[string]struct {
		sent, came []byte
		want       time.Duration
	}{
		"settings":        {nil, bytes.Repeat(frame(4, 0, 0), 100), 100 * one},
		"large data":      {nil, bytes.Repeat(frame(kindData, 0, 1, make([]byte, largeFrame)...), 100), 0},
		"small data":      {nil, bytes.Repeat(frame(kindData, 0, 1, 1), 100), 100 * one},
		"answers":         {bytes.Repeat(frame(kindHeaders, 0, 1), 10), bytes.Repeat(frame(kindHeaders, 0, 1), 10*freeFrames), 0},
		"one answer more": {frame(kindData, 0, 1, 1), bytes.Repeat(frame(kindHeaders, 0, 1), freeFrames+1), one},
		"saved up":        {bytes.Repeat(frame(kindData, 0, 1, 1), mostFree), bytes.Repeat(frame(6, 0, 0), mostFree+10), 10 * one},
	} {
		for _, part := range []int{1, 1 << 20} {
			synctest.Test(t, func(t *testing.T) {
				e, since, server := &Effort{Part: 1}, time.Now(), Sender{ID: "server"}
				d := Dial(&input{data: c.came, part: part}, e, server)
				_, err := d.Write(append(make([]byte, preface), c.sent...))
				testenv.OK(t, err)
				_, err = io.Copy(io.Discard, struct{ io.Reader }{d})
				testenv.OK(t, errors.Join(err, d.Close()))
				if got := time.Since(since) + e.Spend(over, server, 0); got != c.want {
					t.Errorf("%s in parts of %d bytes: %s, want %s", what, part, got, c.want)
				}
			})
		}
	}
}
