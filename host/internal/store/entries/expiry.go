package entries

import (
	"time"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

const (
	sweptSlots   = 1 << 16 // visited by one sweep
	sweptEntries = 256     // found by one sweep
)

// expire sets when an entry expires that was stored at a time, in nanoseconds since 1970. A time in the future comes
// from a clock that was wrong.
func (s *Set) expire(slot uint32, c *catalog.Class, stored int64) {
	at := int64(0)
	if c.Namespace.TTL > 0 {
		stored = min(stored, s.cfg.Now().UnixNano())
		at = (stored + int64(c.Namespace.TTL) + int64(time.Second) - 1) / int64(time.Second)
	}
	s.Index.Expiries.Set(slot, at)
}

// Expired says whether an entry has expired at a time, in seconds since 1970.
func (s *Set) Expired(slot uint32, now int64) bool {
	return s.Index.Expiries.Any() && s.Index.Expiries.Expired(slot, now)
}

// Renew finds the entry of a key, and counts it as expired if it has expired and has no reader. Renew takes the lock.
func (s *Set) Renew(fp uint64, cl *catalog.Class, key *kv.Key) (m Mark, ok bool) {
	s.Lock()
	defer s.Unlock()
	slot := s.Index.Find(fp, cl.Base, key)
	if ok = slot != index.None && s.Expired(slot, s.cfg.Now().Unix()) && s.Evictor.Evictable(slot); ok {
		s.Count.Expired++
	}
	return Mark{slot, fp}, ok
}

// SweepExpired finds a bounded number of entries that have expired and that nobody reads. An entry that would expire
// later than one stored now was stored by a clock that was wrong: its time to live starts again. It takes the lock.
func (s *Set) SweepExpired() (expired []Mark) {
	now := s.cfg.Now().Unix()
	s.Lock()
	defer s.Unlock()
	x := &s.Index.Expiries
	x.Sweep(sweptSlots, func(slot uint32) bool {
		if at := int64(x.At(slot)); at > now && s.Index.At(slot).Is(index.Live) {
			if last := now + int64((s.ClassOf(slot).Namespace.TTL+time.Second-1)/time.Second); at > last+1 {
				x.Set(slot, last)
			}
		}
		if x.Expired(slot, now) && s.Evictor.Evictable(slot) {
			expired = append(expired, Mark{Slot: slot, Fingerprint: s.Index.Fingerprint(slot)})
		}
		return len(expired) < sweptEntries
	})
	s.Count.Expired += uint64(len(expired))
	return expired
}
