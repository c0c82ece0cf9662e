package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// upkeep is a root's own work that nobody waits for, a bounded part of it at a time. It ends with ctx.
func (r *root) upkeep(ctx context.Context) {
	tick := time.NewTicker(r.store.cfg.UpkeepEvery)
	defer tick.Stop()
	for n := uint64(1); ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.upkeepWake:
		}
		r.checkHealth(ctx)
		freeSpace{r}.watch(ctx)
		r.sweepExpired(ctx)
		r.budget.save(true)
		if n%health.MaxPause == 0 && r.Health.Takes() {
			r.Orphans.Retry(ctx)
		}
	}
}
