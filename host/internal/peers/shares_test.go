package peers

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// isFree waits until no caller has anything. A call is answered, and its connection closed, before the last is given back.
func (s *shares) isFree(t *testing.T, when string) {
	t.Helper()
	testenv.Until(t, "nothing is counted "+when, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.of)+len(s.pins) == 0 && s.held == [resources]int{}
	}, func() any {
		s.mu.Lock()
		defer s.mu.Unlock()
		return fmt.Sprintf("%d callers, %d entries, %v", len(s.of), len(s.pins), s.held)
	})
}

// TestSharesAreLeft: whatever callers take, each peer of the configuration gets what is set aside for it, others have no more than half where
// there are peers, and all together no more than there is.
func TestSharesAreLeft(t *testing.T) {
	const seed, most = 5, 400
	random := rand.New(rand.NewPCG(seed, 0))
	for _, peers := range []int{0, 1, 7, 40} {
		s := shares{of: map[caller]*holding{}, peers: peers}
		s.most[lines] = most
		var all []caller
		for i := range peers {
			all = append(all, caller{fmt.Sprint("peer ", i), true})
		}
		for i := range 30 {
			all = append(all, caller{fmt.Sprint("stranger ", i), false})
		}
		for step := range 20_000 {
			who := all[random.IntN(len(all))]
			if has := s.of[who]; has != nil && *has.at(lines) > 0 && random.IntN(4) == 0 {
				s.give(who, lines, 1+random.IntN(*has.at(lines)))
			} else {
				s.take(who, lines, 1+random.IntN(20))
			}
			held, strange := 0, 0
			for o, has := range s.of {
				if held += *has.at(lines); !o.known {
					strange += *has.at(lines)
				}
			}
			if held != s.held[lines] || held > most || peers > 0 && strange > most/2 {
				t.Fatalf("%d peers, step %d of seed %d: %d of %d are held, %d by strangers", peers, step, seed, held, most, strange)
			}
		}
		for _, who := range all { // greedy ones take all they get
			for s.take(who, lines, 1) {
			}
		}
		for i := range peers {
			if n := *s.has(all[i]).at(lines); n < most/4/peers {
				t.Errorf("%d peers: peer %d has got %d, want at least the %d that are set aside for it", peers, i, n, most/4/peers)
			}
		}
	}
}

// TestShareOfAPeerBehindStrangers: strangers that hold all they may leave a peer of the configuration its part, and one of many more than nothing.
func TestShareOfAPeerBehindStrangers(t *testing.T) {
	s := shares{of: map[caller]*holding{}, peers: 3}
	s.most[leases] = 400
	for i := range 100 {
		for s.take(caller{fmt.Sprint(i), false}, leases, 1) {
		}
	}
	got := 0
	for s.take(caller{"peer", true}, leases, 1) {
		got++
	}
	if got < 400/4/3 || got < 50 {
		t.Errorf("a peer has got %d of 400 leases behind a crowd of strangers, want more than the 33 that are set aside for it", got)
	}
}
