package store

import "context"

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
		if !r.Health.Serves() {
			continue
		}
		if m, expired := r.Renew(p.mark.Fingerprint, p.class, &p.key); expired {
			r.drop(m, 0)
		}
	}
}
