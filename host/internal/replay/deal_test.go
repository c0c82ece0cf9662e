package replay

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// A conversation stays with its session, though it shares a system prompt with all others.
func TestConversationsStayTogether(t *testing.T) {
	d := newDealer(4)
	next := uint64(1000)
	var talks [40][]uint64
	for i := range talks {
		talks[i] = []uint64{1, 2} // the system prompt
	}
	home := map[int]int{}
	for turn := range 5 {
		for i := range talks {
			talks[i] = append(talks[i], next)
			next++
			session := d.Deal(talks[i])
			if turn == 0 {
				home[i] = session
			} else if home[i] != session {
				t.Fatalf("turn %d of conversation %d went to session %d, the first to %d", turn, i, session, home[i])
			}
		}
	}
	per := map[int]int{}
	for _, s := range home {
		per[s]++
	}
	for s := range 4 {
		if per[s] < 5 {
			t.Errorf("session %d has %d of 40 conversations: %v", s, per[s], per)
		}
	}
}

// On a real mixture every session gets work. A single session gets all of it.
func TestWorkIsSpread(t *testing.T) {
	for _, n := range []int{1, 3, 8} {
		d := newDealer(n)
		work := make([]int, n)
		total := 0
		r, err := trace.Open("../../../examples/traces/mixed.jsonl.zst")
		testenv.OK(t, err)
		defer r.Close()
		for q := (trace.Request{}); r.Next(&q) == nil; {
			work[d.Deal(q.HashIDs)] += len(q.HashIDs)
			total += len(q.HashIDs)
		}
		if total == 0 {
			t.Fatal("the example trace is empty")
		}
		for s, w := range work {
			if w < total/n/4 {
				t.Errorf("%d sessions: session %d has %d of %d accesses: %v", n, s, w, total, work)
			}
		}
	}
	d := newDealer(2)
	for range 3 {
		d.Deal(nil) // a prompt shorter than a block
	}
}
