package capacity

import (
	"errors"
	"testing"
	"time"
)

// TestCeiling: a file system that is full takes what is there and no more, until a pause is over. Puts that fail together are
// one time; each next time without more written the pause is twice as long, and lasting.
func TestCeiling(t *testing.T) {
	now := time.Unix(0, 0)
	a := New(Config{Bounds: Bounds{Capacity: 100, ForPieces: true}, Now: func() time.Time { return now }})
	a.Commit(0, 40)
	for i, c := range []struct {
		pause        time.Duration
		lasting      int64
		write, again int64 // before it is full; how many puts fail
	}{
		{1, 100, 0, 1}, {2, 40, 0, 3}, {4, 40, 0, 1}, {1, 100, 10, 2}, {2, 50, 0, 1},
	} {
		a.Commit(0, c.write)
		for range c.again {
			a.Full(1, 0, time.Second, 8*time.Second)
		}
		if got := a.Figures(); got.Limit != got.Used || a.Lasting() != c.lasting {
			t.Errorf("time %d: limit %d, lasting %d, want %d and %d", i, got.Limit, a.Lasting(), got.Used, c.lasting)
		}
		now = now.Add(c.pause*time.Second - 1)
		if a.Retry() {
			t.Errorf("time %d: tried again before %d s, want then", i, c.pause)
		}
		if now = now.Add(2); !a.Retry() || a.Figures().Limit != 100 {
			t.Errorf("time %d: limit %d after %d s, want 100", i, a.Figures().Limit, c.pause)
		}
	}
	a.Add(Quarantine, 7)
	a.Reset()
	if got := a.Figures(); got != (Figures{Capacity: 100, Limit: 100}) {
		t.Errorf("after Reset: %+v, want nothing in use", got)
	}
}

// TestAQuotaOfNothing: a tenant with so small a share that it has none of a root stores nothing there, and nothing is evicted.
func TestAQuotaOfNothing(t *testing.T) {
	a := New(Config{Bounds: Bounds{Capacity: 100, ForPieces: true}, Now: time.Now})
	quota := Quotas{{Bytes: 9}}.Of(0, 100, 1000)
	if err := a.Possible(Want{Bytes: 1, Quota: quota}, false); quota != 0 || !errors.Is(err, ErrNoSpace) {
		t.Errorf("with a quota of %d bytes: error %v, want 0 bytes and %v", quota, err, ErrNoSpace)
	}
}

// saves counts how often a budget's file is written.
type saves int

func (s *saves) Load() (day, bytes int64, err error) { return 0, 0, nil }
func (s *saves) Save(day, bytes int64) error         { *s++; return nil }

// TestBudgetIsSavedInSteps: its file, which is synced, is written ahead and not at each put.
func TestBudgetIsSavedInSteps(t *testing.T) {
	var file saves
	b := NewBudget(1000*budgetSteps, time.Now, &file)
	for range 5000 {
		b.Charge(1, 0, func() bool { return true })
		if err := b.Save(false); err != nil {
			t.Fatalf("saving: error %v, want none", err)
		}
	}
	if file < 5 || file > 7 { // a midnight may come
		t.Errorf("the file is written %d times for 5 steps, want 5", file)
	}
}

// TestALimitDuringAScan: a limit of the file system reckons with bytes that a scan has not counted yet. Until its end the capacity alone
// says what never fits.
func TestALimitDuringAScan(t *testing.T) {
	a := New(Config{Bounds: Bounds{Capacity: 100, ForPieces: true}, Now: time.Now})
	a.Full(1, 0, time.Second, 8*time.Second)
	for bytes, want := range map[int64][2]bool{50: {true, false}, 101: {false, false}} {
		for i, scanning := range []bool{true, false} {
			if err := a.Possible(Want{Bytes: bytes, Quota: -1}, scanning); (err == nil) != want[i] || err != nil && !errors.Is(err, ErrNoSpace) {
				t.Errorf("%d bytes, scanning %t: error %v, want none: %t", bytes, scanning, err, want[i])
			}
		}
	}
}
