package store

import (
	"context"
	"path"
	"strings"
	"time"
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

// expiries are the times at which entries expire, in seconds since 1970: four bytes for each slot near one that does, and
// none elsewhere.
type expiries struct {
	chunks []*[slabChunk]uint32
	sweep  uint32 // the slot that is looked at next
}

func (x *expiries) set(slot uint32, at int64) {
	i := int(slot / slabChunk)
	if i >= len(x.chunks) {
		if at == 0 {
			return
		}
		x.chunks = append(x.chunks, make([]*[slabChunk]uint32, i+1-len(x.chunks))...)
	}
	if x.chunks[i] == nil {
		if at == 0 {
			return
		}
		x.chunks[i] = new([slabChunk]uint32)
	}
	x.chunks[i][slot%slabChunk] = uint32(min(max(at, 0), 1<<32-1))
}

// memory is the bytes that the times take.
func (x *expiries) memory() (n int64) {
	for _, c := range x.chunks {
		if c != nil {
			n += int64(len(c)) * 4
		}
	}
	return n + int64(cap(x.chunks))*8
}

// at is when a slot's entry expires; 0 for never.
func (x *expiries) at(slot uint32) uint32 {
	i := int(slot / slabChunk)
	if i >= len(x.chunks) || x.chunks[i] == nil {
		return 0
	}
	return x.chunks[i][slot%slabChunk]
}

// over says whether a slot's entry has expired.
func (x *expiries) over(slot uint32, now int64) bool {
	at := x.at(slot)
	return at != 0 && int64(at) <= now
}

// expire gives an entry that was stored at a time, in nanoseconds since 1970, its end. A time to come is of a clock that was
// wrong. mu is held.
func (r *root) expire(slot uint32, c *class, stored int64) {
	at := int64(0)
	if c.ns.ttl > 0 {
		stored = min(stored, r.store.cfg.Now().UnixNano())
		at = (stored + int64(c.ns.ttl) + int64(time.Second) - 1) / int64(time.Second)
	}
	r.expiries.set(slot, at)
}

// expired says whether an entry is to be served no more. mu is held.
func (r *root) expired(slot uint32, now int64) bool {
	return len(r.expiries.chunks) > 0 && r.expiries.over(slot, now)
}

const (
	sweptSlots   = 1 << 16 // looked at in one go
	sweptEntries = 256     // removed in one go
)

// sweepExpired is the upkeep's part: it removes a bounded number of entries that have expired and that nobody reads. One whose
// end is later than if it had been stored now was stored by a clock that was wrong: its time begins anew.
func (r *root) sweepExpired(ctx context.Context) {
	if !r.takes() {
		return
	}
	var gone []mark
	now := r.store.cfg.Now().Unix()
	r.mu.Lock()
	x := &r.expiries
	for range min(sweptSlots, uint32(len(x.chunks))*slabChunk) {
		if x.sweep >= uint32(len(x.chunks))*slabChunk {
			x.sweep = 0
		}
		if x.chunks[x.sweep/slabChunk] == nil {
			x.sweep += slabChunk
			continue
		}
		slot := x.sweep
		x.sweep++
		if at := int64(x.at(slot)); at > now && r.x.at(slot).is(stLive) {
			if last := now + int64((r.classOf(slot).ns.ttl+time.Second-1)/time.Second); at > last+1 {
				x.set(slot, last)
			}
		}
		if x.over(slot, now) && r.evictable(slot) {
			if gone = append(gone, mark{slot, r.x.slotPrint(slot)}); len(gone) == sweptEntries {
				break
			}
		}
	}
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
	if p.class.ns.ttl == 0 {
		return
	}
	for _, r := range s.roots {
		r.mu.Lock()
		slot := r.x.find(p.mark.print, p.class.base, &p.key)
		old := slot != none && r.serving() && r.expired(slot, s.cfg.Now().Unix()) && r.evictable(slot)
		if old {
			r.count.expired++
		}
		r.mu.Unlock()
		if old {
			r.drop(mark{slot, p.mark.print}, 0)
		}
	}
}
