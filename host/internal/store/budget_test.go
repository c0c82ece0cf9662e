package store

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// TestWriteBudget spends a day's budget: freely, then for what deserves it, then not at all; the next day begins anew.
func TestWriteBudget(t *testing.T) {
	clock := newAt("2026-11-21 20:00:00")
	dir := t.TempDir()
	f := newFixtureIn(t, dir, 100, 1, withClock(clock), func(c *Config) {
		c.Roots[0].DailyWrites, c.UpkeepEvery = 20*pieceBytes, time.Hour
	})
	lone := func(n uint64) error { return f.putUnder(n, n, 0) }
	for n := range uint64(16) {
		if err := lone(100 * n); err != nil {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	if err := lone(5000); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "new prefixes are not admitted") {
		t.Errorf("a new one near the budget: %v", err)
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
	st := f.store.Stats()
	equal(t, "OverBudget", st.Roots[0].OverBudget, 2)
	equal(t, "Refused", st.Refused, 2)
	equal(t, "Written", st.Roots[0].Written, 18*pieceBytes)
	f.restart()
	if got := f.store.Stats().Roots[0].Written; got != 18*pieceBytes {
		t.Errorf("%d bytes after an orderly end", got)
	}
	for n := uint64(5002); n < 5004; n++ {
		noError(t, f.putUnder(n, n-1, 0))
	}
	if err := f.putUnder(5004, 5003, 0); !errors.Is(err, ErrRefused) || strings.Contains(err.Error(), "nearly") {
		t.Errorf("beyond the budget: %v", err)
	}
	if f.root().facts(0).Flags != 0 {
		t.Error("the place policy is not told")
	}
	f.mustRead(5003)
	clock.pass(5 * time.Hour)
	equal(t, "Written on the next day", f.written(), 0)
	noError(t, lone(7000))
	f.checkUsed()
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

func withBudget(pieces int64) func(*Config) {
	return func(c *Config) { c.Roots[0].DailyWrites, c.UpkeepEvery = pieces*pieceBytes, time.Hour }
}

func (f *fixture) written() int64 { return f.store.Stats().Roots[0].Written / pieceBytes }

// TestBudgetOutlivesACrash: whatever was written before it, the count that is found is not less, and not much more. The
// file is as durable as what it counts.
func TestBudgetOutlivesACrash(t *testing.T) {
	const pieces = 1280 // 64 steps of 20
	for seed := range uint64(3) {
		f, machine := onMachine(t, 400, withClock(newAt("2026-11-21 10:00:00")), withBudget(pieces))
		wrote := int64(0)
		for life := range 4 {
			for range 10 + 31*life {
				f.mustPut(uint64(1000*life) + uint64(wrote))
				wrote++
			}
			if life%2 == 0 {
				f.kill()
				f.start()
			} else {
				must(t, machine.PowerLoss(seed))
				f.kill()
				var err error
				machine, err = faultfs.NewMachine(staging.OS(), t.TempDir())
				must(t, err)
				f.cfg.FS = machine
				f.start()
			}
			if got := f.written(); got < wrote || got > wrote+2*pieces/64 {
				t.Fatalf("life %d: %d pieces are counted, %d were written", life, got, wrote)
			}
			wrote = f.written()
		}
	}
}

// TestBudgetCountsWhatIsWritten: a put that is shed costs nothing, nor does one that is given up before its file is
// made; a rank that an entry grows by does.
func TestBudgetCountsWhatIsWritten(t *testing.T) {
	f := newFixture(t, 2, 1, withClock(newAt("2026-11-21 10:00:00")), withBudget(100))
	f.mustPut(0, 1)
	l := f.lookup(0, 1)
	for n := range uint64(50) {
		if err := f.put(10+n, 0); !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
	}
	if got := f.written(); got != 2 {
		t.Errorf("%d pieces are counted after 50 sheds", got)
	}
	l.Release()
	p, err := f.store.Put(t.Context(), f.request(3, 3, 0))
	must(t, err)
	p.Abort(errors.New("the client has gone"))
	if got := f.written(); got != 2 {
		t.Errorf("%d pieces are counted, and one put came to nothing", got)
	}
	if p, err = f.store.Put(t.Context(), f.request(3, 3, 0)); err == nil {
		err = write(p)
	}
	must(t, err)
	p.Abort(errors.New("the client has gone later"))
	if got := f.written(); got != 3 {
		t.Errorf("%d pieces are counted, and what was written of one counts", got)
	}

	f = newFixture(t, 4, 2, withClock(newAt("2026-11-21 10:00:00")), withBudget(2))
	for rank := range uint32(2) {
		must(t, f.putRank(0, 0, rank, 1<<rank))
		if got, want := f.written(), int64(rank+1); got != want {
			t.Errorf("%d pieces are counted, want %d", got, want)
		}
	}
	f = newFixture(t, 4, 2, withClock(newAt("2026-11-21 10:00:00")), withBudget(1))
	err = f.putRank(0, 0, 0, 1)
	if again := f.putRank(0, 0, 0, 1); err != nil && !errors.Is(again, ErrResident) {
		err = again // the budget is nearly spent from the first one on
	}
	if err := f.putRank(0, 0, 1, 2); !errors.Is(err, ErrRefused) {
		t.Errorf("a rank beyond the budget: %v", err)
	}
	f.checkUsed()
}

// TestBudgetAfterAClockStep: a look at a clock that is wrong does not end the budget for good.
func TestBudgetAfterAClockStep(t *testing.T) {
	clock := newAt("2026-11-21 10:00:00")
	f := newFixture(t, 100, 1, withClock(clock), withBudget(10))
	const wrong = 30 * 24 * time.Hour
	clock.pass(wrong)
	f.mustPut(upTo(8)...)
	clock.pass(-wrong)
	for n := uint64(10); n < 18; n++ {
		f.mustPut(n)
	}
	clock.pass(wrong)
	for n := uint64(20); n < 28; n++ {
		f.mustPut(n)
	}
	f.restart()
	clock.pass(-wrong)
	f.restart()
	f.mustPut(30)
	if got := f.written(); got != 1 {
		t.Errorf("%d pieces are counted", got)
	}
	clock.pass(-11 * time.Hour) // over midnight: the same budget
	f.mustPut(31)
	if got := f.written(); got != 2 {
		t.Errorf("%d pieces are counted", got)
	}
}

// TestBudgetsOfHostsThatShare: each host's budget is its own.
func TestBudgetsOfHostsThatShare(t *testing.T) {
	clock := newAt("2026-11-21 10:00:00")
	f := newFixture(t, 100, 1, withClock(clock), withBudget(100), func(c *Config) {
		c.Roots[0].Shared = true
	})
	f.mustPut(0, 1, 2)
	must(t, f.store.Close())
	f.cfg.HostID = "otherhost"
	f.start()
	if got := f.written(); got != 0 {
		t.Errorf("the other host begins with %d pieces", got)
	}
	f.mustPut(3)
	must(t, f.store.Close())
	f.cfg.HostID = "testhost"
	f.start()
	if got := f.written(); got != 3 {
		t.Errorf("the first host finds %d pieces", got)
	}
}

// TestBudgetThatCannotBeRead: a start that cannot read the count does not begin with none.
func TestBudgetThatCannotBeRead(t *testing.T) {
	f, faulty := faultyFixture(t, 100, withClock(newAt("2026-11-21 10:00:00")), withBudget(100))
	f.mustPut(0, 1, 2)
	must(t, f.store.Close())
	faulty.Set(faultfs.MustRules("open **/written*: eio")...)
	if s, err := Open(t.Context(), f.cfg); err == nil {
		s.Close()
		t.Error("a root is opened whose count cannot be read, want an error")
	}
	faulty.Set()
	f.start()
	equal(t, "count after an error", f.written(), 3)
}
