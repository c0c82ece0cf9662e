package staging

import (
	"context"

	"golang.org/x/sync/semaphore"
)

// Turns limits the number of concurrent holders. Tenants take turns regardless of the number of their callers: at any
// time, only one waiting caller of each tenant competes with those of the others.
type Turns struct {
	all   *semaphore.Weighted
	lines [64]*semaphore.Weighted // by tenant modulo their number: tenants of one line share its turns
}

// NewTurns returns turns for n concurrent holders.
func NewTurns(n int) *Turns {
	t := &Turns{all: semaphore.NewWeighted(int64(n))}
	for i := range t.lines {
		t.lines[i] = semaphore.NewWeighted(1)
	}
	return t
}

// Take waits for a turn, which Give returns. The error is the context's.
func (t *Turns) Take(ctx context.Context, tenant uint32) error {
	line := t.lines[tenant%uint32(len(t.lines))]
	if err := line.Acquire(ctx, 1); err != nil {
		return err
	}
	defer line.Release(1)
	return t.all.Acquire(ctx, 1)
}

func (t *Turns) Give() { t.all.Release(1) }
