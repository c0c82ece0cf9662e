package store

import (
	"context"
	"path"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
)

// Expiry is how long entries of some models are served.
type Expiry struct {
	Model string // a pattern as of [path.Match], for the namespace's model
	TTL   time.Duration
}

// ttlOf is the time to live of a namespace's entries, 0 for none: the first pattern that fits counts.
func (c *Config) ttlOf(text string) time.Duration {
	for line := range strings.Lines(text) {
		model, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "model=")
		if !ok {
			continue
		}
		for _, e := range c.Expiries {
			if fits, _ := path.Match(e.Model, model); fits {
				return e.TTL
			}
		}
	}
	return 0
}

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
