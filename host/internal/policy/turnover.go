package policy

import (
	"math"
	"time"
)

// Turnover measures the time in which a host replaces its content. It uses the time of the last replacements of about
// twice the content, since a few long prompts can replace a small content once.
type Turnover struct {
	gone  int64                            // total replaced so far, in the unit of the content
	marks [2*turnoverParts + 1]replacement // oldest first
	n     int
}

type replacement struct {
	gone int64
	at   time.Duration
}

const (
	turnoverParts = 4 // marks per replaced content
	// Endless is the turnover of a host with room, or without replacements.
	Endless = time.Duration(math.MaxInt64)
	// takerTurnover is the least ratio of a taker's turnover to that of the host that evicts: a victim must live longer
	// there. With a ratio of 1.5, equal hosts send each other victims that displace better entries, and a trace of
	// conversations has fewer hits than without offers.
	takerTurnover = 3
)

// Replaced counts n of the content that new entries have replaced, at a time.
func (t *Turnover) Replaced(n, content int64, now time.Duration) {
	if t.n == 0 {
		t.marks[0], t.n = replacement{at: now}, 1
	}
	t.gone += n
	if t.gone-t.marks[t.n-1].gone < content/turnoverParts {
		return
	}
	if t.n == len(t.marks) {
		copy(t.marks[:], t.marks[1:])
		t.n--
	}
	t.marks[t.n] = replacement{t.gone, now}
	t.n++
}

// Of returns the turnover of a content at a time.
func (t *Turnover) Of(content int64, now time.Duration) time.Duration {
	gone := t.gone - t.marks[0].gone
	if gone == 0 {
		return Endless
	}
	return time.Duration(min(float64(now-t.marks[0].at)*(float64(content)/float64(gone)), math.MaxInt64/2))
}

// Taker returns the index of the host to offer a victim to: the host with the longest turnover, if that is long enough,
// or -1. others are the turnovers of the other hosts, 0 if unknown. Hosts with equal turnovers take turns.
func Taker(own time.Duration, others []time.Duration, turn int) int {
	best := -1
	for i := range others {
		i = (i + turn) % len(others)
		if t := others[i]; t > 0 && own <= Endless/takerTurnover && t >= takerTurnover*own && (best < 0 || t > others[best]) {
			best = i
		}
	}
	return best
}

// HasRoom reports whether a host with this much free capacity has room. Its turnover is then [Endless].
func HasRoom(free, capacity int64) bool { return free > capacity/16 }
