package store

import (
	"context"
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
	f := newFixture(t, 20, 1, withClock(clock), hourly("test/*"))
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
	f.root().sweepExpired(f.Context())
	if got := f.store.Stats().Roots[0]; got.Expired != 1 || got.Entries != 3 {
		t.Errorf("one is stored anew and one is read: %+v", got)
	}
	held.Release()
	f.root().sweepExpired(f.Context())
	got := f.store.Stats().Roots[0]
	equal(t, "Expired", got.Expired, 2)
	equal(t, "Entries", got.Entries, 2)
	f.checkUsed()
	clock.pass(2 * time.Hour)
	f.restart()
	if f.has(0) || f.has(2) {
		t.Error("a hit on what expired while the host was down")
	}
}

// TestExpiriesAreCounted: the times take memory, which the root's figures have.
func TestExpiriesAreCounted(t *testing.T) {
	const slots = 4096 // times are kept for as many at a time
	var of [2]int64
	for i, expiry := range []func(*Config){func(*Config) {}, hourly("test/*")} {
		f := newFixture(t, 20, 1, expiry)
		f.mustPut(0)
		of[i] = f.store.Stats().Roots[0].IndexBytes
	}
	if got := of[1] - of[0]; got < 4*slots || got > 4*slots+1024 {
		t.Errorf("times to live take %d bytes for %d slots", got, slots)
	}
}

// TestNoExpiryForOthers leaves other models alone, also in slots that entries with an end had before.
func TestNoExpiryForOthers(t *testing.T) {
	clock := newAt("2026-11-21 10:00:00")
	f := newFixture(t, 2, 1, withClock(clock), hourly("test/model"))
	f.mustPut(0, 1)
	f.ns.Model = "another/model"
	var err error
	f.space, err = f.store.Namespace(context.Background(), f.ns)
	must(t, err)
	f.mustPut(2, 3)
	clock.pass(2 * time.Hour)
	f.mustRead(2, 3)
}

// TestExpiryAfterTheClockIsSetBack: what lookups go by is the clock that gave entries their end. The store counts the
// time of events from its start, and has the start's idea of the time of day.
func TestExpiryAfterTheClockIsSetBack(t *testing.T) {
	clock := newAt("2026-11-21 12:00:00")
	f := newFixture(t, 20, 1, withClock(clock), hourly("test/*"))
	clock.pass(-2 * time.Hour)
	f.mustPut(0)
	f.mustRead(0)
	clock.pass(time.Hour + time.Second)
	if f.has(0) {
		t.Error("a hit on what has expired")
	}
}

// TestExpiryAfterAWrongClock: a look at a clock that is far ahead lets nothing live longer than its time, neither what
// was stored then, nor what is stored later, before or after a restart, by a checkpoint or by a scan.
func TestExpiryAfterAWrongClock(t *testing.T) {
	for name, restart := range map[string]func(*fixture){"runs on": func(*fixture) {}, "checkpoint": (*fixture).restart,
		"scan": (*fixture).crash} {
		t.Run(name, func(t *testing.T) {
			clock := newAt("2026-11-21 10:00:00")
			f := newFixture(t, 20, 1, withClock(clock), hourly("test/*"))
			const wrong = 30 * 24 * time.Hour
			clock.pass(wrong)
			f.mustPut(0)
			clock.pass(-wrong)
			f.mustPut(1)
			restart(f)
			f.mustPut(2)
			f.root().sweepExpired(f.Context())
			clock.pass(time.Hour + 2*time.Second)
			for n := range uint64(3) {
				if f.has(n) {
					t.Errorf("key %d is a hit after its time", n)
				}
			}
			f.mustPut(3)
			f.mustRead(3)
			if ahead := f.store.seq.Stamp() - clock.nanos.Load(); name != "runs on" && ahead > int64(time.Hour) {
				t.Errorf("store times are %v ahead", time.Duration(ahead))
			}
		})
	}
}
