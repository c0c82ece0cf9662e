package store

import (
	"context"
	"errors"
	"math/bits"
	"sync/atomic"
	"testing"
	"time"
)

// at is a clock that stands where it is set.
type at struct{ nanos atomic.Int64 }

func (c *at) now() time.Time       { return time.Unix(0, c.nanos.Load()) }
func (c *at) pass(d time.Duration) { c.nanos.Add(int64(d)) }
func newAt(s string) *at {
	c := &at{}
	t, _ := time.Parse(time.DateTime, s)
	c.nanos.Store(t.UnixNano())
	return c
}
func withClock(c *at) func(*Config) { return func(cfg *Config) { cfg.Now = c.now } }
func hourly(model string) func(*Config) {
	return func(c *Config) { c.Expiries, c.UpkeepEvery = []Expiry{{Model: model, TTL: time.Hour}}, time.Hour }
}

// TestExpiry: an entry that has expired is a miss at once, goes with the next sweep, and can be stored again.
func TestExpiry(t *testing.T) {
	clock := newAt("2026-11-21 10:00:00")
	f := newFixture(t, t.TempDir(), 20, 1, withClock(clock), hourly("test/*"))
	f.mustPut(0, 1)
	clock.pass(30 * time.Minute)
	f.mustPut(2)
	f.restart()
	clock.pass(29 * time.Minute)
	f.mustRead(0)
	held := f.lookup(1)
	clock.pass(time.Minute + time.Second)
	if f.has(0) || f.has(1) || !f.has(2) {
		t.Error("hits do not go by age")
	}
	if data, err := read(held, 0, 0); err != nil || len(data) == 0 {
		t.Errorf("under a lease from before: %v", err)
	}
	f.mustPut(0) // not yet swept
	f.mustRead(0)
	f.store.roots[0].sweepExpired(context.Background())
	if got := f.store.Stats().Roots[0]; got.Expired != 1 || got.Entries != 3 {
		t.Errorf("one is stored anew and one is read: %+v", got)
	}
	held.Release()
	f.store.roots[0].sweepExpired(context.Background())
	if got := f.store.Stats().Roots[0]; got.Expired != 2 || got.Entries != 2 {
		t.Errorf("%+v", got)
	}
	f.checkUsed()
	clock.pass(2 * time.Hour)
	f.restart()
	if f.has(0) || f.has(2) {
		t.Error("a hit on what expired while the host was down")
	}
}

// TestNoExpiryForOthers leaves other models alone, also in slots that entries with an end had before.
func TestNoExpiryForOthers(t *testing.T) {
	clock := newAt("2026-11-21 10:00:00")
	f := newFixture(t, t.TempDir(), 2, 1, withClock(clock), hourly("test/model"))
	f.mustPut(0, 1)
	f.ns.Model = "another/model"
	var err error
	if f.space, err = f.store.Space(context.Background(), f.ns); err != nil {
		t.Fatal(err)
	}
	f.mustPut(2, 3)
	clock.pass(2 * time.Hour)
	f.mustRead(2)
	f.mustRead(3)
}

// TestWriteBudget spends a day's budget: freely, then for what deserves it, then not at all; the next day begins anew.
func TestWriteBudget(t *testing.T) {
	clock := newAt("2026-11-21 20:00:00")
	dir := t.TempDir()
	f := newFixture(t, dir, 100, 1, withClock(clock), func(c *Config) {
		c.Roots[0].DailyWrites, c.UpkeepEvery = 20*pieceBytes, time.Hour
	})
	lone := func(n uint64) error { return f.putUnder(n, n, 0) }
	for n := range uint64(16) {
		if err := lone(100 * n); err != nil {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	if err := lone(5000); !errors.Is(err, ErrRefused) {
		t.Errorf("a new one under thrift: %v", err)
	}
	if err := lone(5000); err != nil {
		t.Errorf("asked for again: %v", err)
	}
	if err := f.putUnder(5001, 5000, 0); err != nil {
		t.Errorf("in continuation of what is there: %v", err)
	}
	if err := f.putUnder(6001, 6000, 0); !errors.Is(err, ErrRefused) {
		t.Errorf("in continuation of what is not there: %v", err)
	}
	if st := f.store.Stats(); st.Roots[0].Thrift != 2 || st.Refused != 2 || st.Roots[0].Written != 18*pieceBytes {
		t.Errorf("%+v", st)
	}
	f.restart()
	if got := f.store.Stats().Roots[0].Written; got != 18*pieceBytes {
		t.Errorf("%d bytes after an orderly end", got)
	}
	for n := uint64(5002); n < 5004; n++ {
		if err := f.putUnder(n, n-1, 0); err != nil {
			t.Error(err)
		}
	}
	if err := f.putUnder(5004, 5003, 0); !errors.Is(err, ErrRefused) {
		t.Errorf("beyond the budget: %v", err)
	}
	if f.store.roots[0].facts(0).Flags != 0 {
		t.Error("the place policy is not told")
	}
	f.mustRead(5003)
	clock.pass(5 * time.Hour) // the next day
	if err := lone(7000); err != nil {
		t.Error(err)
	}
	f.checkUsed()

	// A crash makes it count too much, never too little.
	spent := f.store.Stats().Roots[0].Written
	f.store.roots[0].saveWritten(false)
	if err := lone(7001); err != nil {
		t.Error(err)
	}
	b := &f.store.roots[0].budget
	if b.ahead < spent || bits.Len64(uint64(b.ahead)) == 0 {
		t.Errorf("the file says %d bytes, %d are written", b.ahead, spent)
	}
}

// TestBudgetSpentElsewhere: with two roots, what one may not write any more goes to the other.
func TestBudgetSpentElsewhere(t *testing.T) {
	f, _, _ := twoRoots(t, 200, func(c *Config) { c.Roots[1].DailyWrites = 4 * pieceBytes })
	for n := range uint64(60) {
		if err := f.put(n, 0); err != nil {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	if got := f.store.Stats().Roots[1].Written; got > 4*pieceBytes || got == 0 {
		t.Errorf("%d bytes written", got)
	}
}
