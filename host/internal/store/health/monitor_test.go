package health

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
)

type away struct{ probes int }

func (a *away) Probe() (bool, error) { a.probes++; return false, errors.New("away") }

func (a *away) Reopen(context.Context, State, bool) error { return nil }

// TestProbesGoOn: a root that was out for a day is probed every few seconds, so that it is back soon after its device.
func TestProbesGoOn(t *testing.T) {
	now, root := time.Now(), &away{}
	m := NewMonitor(Config{
		FS: staging.OS(), Dir: t.TempDir(), Limit: time.Minute, Every: time.Second, Log: slog.New(slog.DiscardHandler),
		Now: func() time.Time { return now },
	})
	defer m.Close()
	m.TakeOut("test", errors.New("gone"), "")
	check := func(d time.Duration) (probes int) {
		before := root.probes
		for end := now.Add(d); now.Before(end); now = now.Add(100 * time.Millisecond) {
			m.Check(t.Context(), root)
		}
		return root.probes - before
	}
	if got := check(5 * time.Second); got < 2 || got > 3 {
		t.Errorf("%d probes in the first 5 s, want 2 or 3: the pause doubles", got)
	}
	now = now.Add(24 * time.Hour)
	check(time.Hour)
	if got := check(5 * time.Second); got < 1 || got > 2 {
		t.Errorf("%d probes in 5 s after an hour of them, want 1 or 2", got)
	}
}
