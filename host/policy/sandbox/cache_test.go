package sandbox

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
)

// The wait for another compiler can be cancelled.
func TestOneCompilerAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	a, errA := OpenCache(dir)
	b, errB := OpenCache(dir) // as two processes would
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	unlock, err := a.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.lock(ctx); !errors.Is(err, ErrCache) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	unlock()
	unlock, err = b.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}
