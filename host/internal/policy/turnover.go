package policy

import (
	"math"
	"time"
)

// Turnover tells how long a host takes to replace what it holds, by how long it took for about twice as much the last time: few long
// prompts can replace a small content once.
type Turnover struct {
	gone  int64                            // all that was ever replaced, in the unit that content is in
	marks [2*turnoverParts + 1]replacement // the oldest first
	n     int
}

type replacement struct {
	gone int64
	at   time.Duration
}

const (
	turnoverParts = 4 // marks in a content
	// Endless is the turnover of a host that has room, or has replaced nothing.
	Endless = time.Duration(math.MaxInt64)
	// takerTurnover is how many times as long a host must take that another one's victims go to: they are worth more there. With 1.5
	// hosts that are alike send each other what displaces better, and a trace of conversations has fewer hits than without.
	takerTurnover = 3
)

// Replaced counts what has gone for something new, of so much content, at a time.
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

// Of is the turnover of so much content at a time.
func (t *Turnover) Of(content int64, now time.Duration) time.Duration {
	gone := t.gone - t.marks[0].gone
	if gone == 0 {
		return Endless
	}
	return time.Duration(min(float64(now-t.marks[0].at)*(float64(content)/float64(gone)), math.MaxInt64/2))
}

// Taker is who gets what a host evicts, given the turnovers of the others, 0 where it is not known: the one that takes longest, if that is
// long enough, or -1. Those that take as long have turns.
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

// HasRoom says whether a host with so much free of its capacity has room: its turnover is [Endless].
func HasRoom(free, capacity int64) bool { return free > capacity/16 }
