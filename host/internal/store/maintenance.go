package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// upkeep is the background work of a root, a bounded amount at a time. It ends with ctx.
func (r *root) upkeep(ctx context.Context) {
	tick := time.NewTicker(r.store.cfg.UpkeepEvery)
	defer tick.Stop()
	for n, next, pause := 1, 1, 1; ; n++ { // pause: periods until the next retry of orphans
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.upkeepWake:
		}
		r.checkHealth(ctx)
		freeSpace{r}.watch(ctx)
		r.sweepExpired(ctx)
		r.saveBudget(true)
		if r.Health.Takes() {
			r.bringNear()
		}
		if r == r.level.roots[0] {
			r.level.sayShed()
		}
		if r.Health.Takes() && n >= next {
			if pause = min(2*pause, health.MaxPause); !r.Orphans.Retry(ctx) {
				pause = 1
			}
			next = n + pause
		}
		if r.Health.Serves() {
			r.Quarantine.Reread()
			r.recovery.again(ctx)
		}
	}
}

// sweepExpired removes a bounded number of expired entries without readers.
func (r *root) sweepExpired(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	for _, m := range r.SweepExpired() {
		if ctx.Err() != nil {
			return
		}
		r.drop(m)
	}
}
