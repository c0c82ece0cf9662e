package store

import (
	"context"
	"path"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/store/catalog"
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

// expire sets when an entry expires that was stored at a time, in nanoseconds since 1970. A time in the future comes
// from a clock that was wrong. mu is held.
func (r *entries) expire(slot uint32, c *catalog.Class, stored int64) {
	at := int64(0)
	if c.Namespace.TTL > 0 {
		stored = min(stored, r.store.cfg.Now().UnixNano())
		at = (stored + int64(c.Namespace.TTL) + int64(time.Second) - 1) / int64(time.Second)
	}
	r.x.Expiries.Set(slot, at)
}

// expired says whether an entry has expired. mu is held.
func (r *entries) expired(slot uint32, now int64) bool {
	return r.x.Expiries.Any() && r.x.Expiries.Expired(slot, now)
}

const (
	sweptSlots   = 1 << 16 // visited by one sweep
	sweptEntries = 256     // removed by one sweep
)

// sweepExpired removes a bounded number of entries that have expired and that nobody reads. An entry that would expire
// later than one stored now was stored by a clock that was wrong: its time to live starts again.
func (r *root) sweepExpired(ctx context.Context) {
	if !r.health.Takes() {
		return
	}
	var gone []mark
	now := r.store.cfg.Now().Unix()
	r.mu.Lock()
	x := &r.x.Expiries
	x.Sweep(sweptSlots, func(slot uint32) bool {
		if at := int64(x.At(slot)); at > now && r.x.At(slot).Is(index.Live) {
			if last := now + int64((r.classOf(slot).Namespace.TTL+time.Second-1)/time.Second); at > last+1 {
				x.Set(slot, last)
			}
		}
		if x.Expired(slot, now) && r.evictor.Evictable(slot) {
			gone = append(gone, mark{slot, r.x.Fingerprint(slot)})
		}
		return len(gone) < sweptEntries
	})
	r.count.expired += uint64(len(gone))
	r.mu.Unlock()
	for _, m := range gone {
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
		r.mu.Lock()
		slot := r.x.Find(p.mark.fp, p.class.Base, &p.key)
		old := slot != index.None && r.health.Serves() && r.expired(slot, s.cfg.Now().Unix()) && r.evictor.Evictable(slot)
		if old {
			r.count.expired++
		}
		r.mu.Unlock()
		if old {
			r.drop(mark{slot, p.mark.fp}, 0)
		}
	}
}
