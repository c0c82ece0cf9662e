package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// upkeep is a root's own work in the background, a bounded part of it at a time. It ends with ctx.
func (r *root) upkeep(ctx context.Context) {
	tick := time.NewTicker(r.store.cfg.UpkeepEvery)
	defer tick.Stop()
	for n, next, pause := 1, 1, 1; ; n++ { // pause is how many periods orphans wait
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

// saying is what the log has of copies that a level's entries went without.
type saying struct {
	next time.Time
	shed uint64
}

// saidEvery is how often the log says so at most.
const saidEvery = time.Minute

// sayShed logs that entries of the level go without a copy in the next one, or wait for it in vain.
func (l *level) sayShed() {
	below, now := l.below(), l.store.cfg.Now()
	if below == nil || now.Before(l.said.next) {
		return
	}
	gone, waits := below.count[moves.Demotion].Shed.Load(), below.count[moves.Through].Shed.Load()
	if gone+waits == l.said.shed {
		return
	}
	l.said = saying{now.Add(saidEvery), gone + waits}
	all, kept := l.kept()
	l.store.log.Warn("copies to the next level are shed: it takes fewer bytes than are stored; see move.bandwidth and move.workers",
		"to_level", below.number, "gone", gone, "shed", waits, "in_memory", all, "of_these_kept", kept)
}

// sweepExpired removes a bounded number of entries that have expired and have no readers.
func (r *root) sweepExpired(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	for _, m := range r.SweepExpired() {
		if ctx.Err() != nil {
			return
		}
		r.drop(m, 0)
	}
}

// renew removes an entry that has expired, so that its key can be stored again.
func (s *Store) renew(p *Put) {
	if p.class.Namespace.TTL == 0 {
		return
	}
	for _, r := range s.roots {
		if !r.Health.Serves() {
			continue
		}
		if m, expired := r.Renew(p.mark.Fingerprint, p.class, &p.key); expired {
			r.drop(m, 0)
		}
	}
}

// freeSpace watches what a root's file system has left.
type freeSpace struct{ *root }

// refresh measures what the file system has left when a put may not go by the last measurement.
func (r freeSpace) refresh() {
	if r.Account.Stale() {
		r.measure()
	}
}

// measure asks the file system what it has left.
func (r freeSpace) measure() {
	space, err := r.FS.Statfs(r.Path)
	if err != nil {
		return // the last measurement stands
	}
	r.Lock()
	defer r.Unlock()
	if r.cfg.Volatile {
		r.Account.Owns(space.Total)
		return
	}
	r.Account.Measured(space.Total, space.Available, r.Unwritten())
}

// full is called when the file system was full although the account had room.
func (r freeSpace) full(entry int64, cause error) {
	r.Lock()
	r.Account.Full(entry, r.Unwritten(), r.store.cfg.UpkeepEvery, health.MaxPause*r.store.cfg.UpkeepEvery)
	r.Unlock()
	r.Health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// watch is the upkeep's part: it keeps the floor when others write, and tries whether there is room again.
func (r freeSpace) watch(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	if r.Account.Floor() {
		r.measure()
	}
	if r.Account.Retry() {
		r.Health.Promote(health.Full, health.In)
	}
	r.shrink(ctx)
}
