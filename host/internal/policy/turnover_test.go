package policy

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestTurnover: it is the time that a content takes at the pace of the last two, grows while nothing goes, and never overflows.
func TestTurnover(t *testing.T) {
	var u Turnover
	const content = 1000
	now := 7 * time.Hour
	if got := u.Of(content, now); got != Endless {
		t.Errorf("%s before anything has gone, want endless", got)
	}
	about := func(when string, want time.Duration) {
		t.Helper()
		if got := u.Of(content, now); got < want*3/4 || got > want*4/3 {
			t.Errorf("%s: %s, want about %s", when, got, want)
		}
	}
	replace := func(n int64, in time.Duration) {
		for i := range time.Duration(n) {
			u.Replaced(1, content, now+in*(i+1)/time.Duration(n))
		}
		now += in
	}
	replace(content/10, time.Minute)
	about("a tenth in a minute", 10*time.Minute)
	replace(5*content, 100*time.Minute)
	about("five contents in 100 minutes", 20*time.Minute)
	replace(3*content, 3*time.Minute)
	about("three more in 3 minutes", time.Minute)
	replace(content/4, 30*time.Second)
	if got := u.Of(content, now); got > 2*time.Minute {
		t.Errorf("%s after a quarter at half the pace, want it to count for a part", got)
	}
	now += 10 * time.Hour
	if got := u.Of(content, now); got < 4*time.Hour {
		t.Errorf("%s after ten hours in which nothing has gone, want it to grow", got)
	}
	var large Turnover
	large.Replaced(1, 1<<60, 0)
	if got := large.Of(1<<60, Endless); got <= 0 {
		t.Errorf("%s for a byte of 2^60 in 292 years, want it above 0", got)
	}
}

// TestTaker: the one that takes longest is chosen if that is three times as long, those that take as long in turns, and none that does not say.
func TestTaker(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		own    time.Duration
		others []time.Duration
		want   int
	}{
		{s, nil, -1},
		{s, []time.Duration{0, s, 3*s - 1}, -1},
		{s, []time.Duration{0, 3 * s, 2 * s}, 1},
		{s, []time.Duration{3 * s, Endless, 9 * s}, 1},
		{0, []time.Duration{0, 0, 1}, 2},
		{Endless, []time.Duration{Endless, Endless}, -1},
		{Endless / 2, []time.Duration{Endless, 1}, -1},
	} {
		for turn := range 4 {
			if got := Taker(c.own, c.others, turn); got != c.want {
				t.Errorf("of %s %v in turn %d: %d, want %d", c.own, c.others, turn, got, c.want)
			}
		}
	}
	count := [3]int{}
	for turn := range 30 {
		count[Taker(s, []time.Duration{Endless, s, Endless}, turn)]++
	}
	if count[0] < 10 || count[1] != 0 || count[2] < 10 {
		t.Errorf("two that take as long are chosen %v times, want both", count)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		own, others := time.Duration(r.Int64()), []time.Duration{time.Duration(r.Int64()), time.Duration(r.Int64())}
		if n := Taker(own, others, r.IntN(9)); n >= 0 && others[n]/3 < own-1 {
			t.Errorf("of %d %v the %d. is chosen, want three times as long", own, others, n)
		}
	}
}
