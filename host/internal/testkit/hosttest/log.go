package hosttest

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
)

// uniqueKeys is the log of a host that is configured without one: the test fails if a record repeats a key. A host may log after
// the end of its test, so that what was found is told when the test cleans up.
type uniqueKeys struct {
	keys  []string // of the logger
	found *repeated
}

type repeated struct {
	sync.Mutex
	records []string
}

func newLog(t testing.TB) *slog.Logger {
	found := &repeated{}
	t.Cleanup(func() {
		found.Lock()
		defer found.Unlock()
		for _, r := range found.records {
			t.Errorf("the host logged %s", r)
		}
	})
	return slog.New(uniqueKeys{[]string{slog.LevelKey, slog.MessageKey, slog.TimeKey, slog.SourceKey}, found})
}

func (h uniqueKeys) Enabled(context.Context, slog.Level) bool { return true }

func (h uniqueKeys) Handle(_ context.Context, r slog.Record) error {
	keys := slices.Clone(h.keys)
	r.Attrs(func(a slog.Attr) bool {
		keys = append(keys, a.Key)
		return true
	})
	for i, key := range keys {
		if slices.Contains(keys[:i], key) {
			h.found.Lock()
			h.found.records = append(h.found.records, r.Message+": the key "+key+" is there twice")
			h.found.Unlock()
		}
	}
	return nil
}

func (h uniqueKeys) WithAttrs(attrs []slog.Attr) slog.Handler {
	keys := slices.Clone(h.keys)
	for _, a := range attrs {
		keys = append(keys, a.Key)
	}
	return uniqueKeys{keys, h.found}
}

func (h uniqueKeys) WithGroup(string) slog.Handler { return h }
