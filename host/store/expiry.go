package store

import (
	"context"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
)

// sweepExpired removes a bounded number of entries that have expired and that nobody reads.
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
		r.Lock()
		slot := r.Index.Find(p.mark.Fingerprint, p.class.Base, &p.key)
		old := slot != index.None && r.Health.Serves() && r.Expired(slot, s.cfg.Now().Unix()) && r.Evictor.Evictable(slot)
		if old {
			r.Count.Expired++
		}
		r.Unlock()
		if old {
			r.drop(entries.Mark{Slot: slot, Fingerprint: p.mark.Fingerprint}, 0)
		}
	}
}
