package entries

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

type Config struct {
	MaxEntries uint32
	Account    *capacity.Account
	Catalog    *catalog.Catalog
	Changes    *ChangeLog
	Copies     *Copies // shared by all roots; nil if there is only one
	Volatile   bool    // the entries are lost when the host stops
	Now        func() time.Time
	Clock      func() uint64 // returns the time for events
}

// Set holds the entries of one root.
type Set struct {
	sync.Mutex
	Index   *index.Index
	Evictor *evictor.Evictor
	Account *capacity.Account
	Count   Counters
	Moves   Moves
	Hits    Hits
	// Prefetched holds the entries that were copied to this level at the request of a lookup.
	Prefetched Prefetched
	// Touched receives the fingerprints of entries that lookups touch. It may be nil.
	Touched func(fp uint64)

	cfg      Config
	reaped   sync.Cond // signalled when an evicted entry has left the table or its slot is free
	flights  flights
	complete int64 // number of complete entries
	scanning bool
	// removed holds the fingerprints of entries that were removed during the running scan.
	removed map[uint64]struct{}
}

// Counters count since the store was opened.
type Counters struct {
	Published   uint64 // pieces
	Aborted     uint64 // pieces
	Recycled    uint64 // files of victims that became temporaries of puts
	Expired     uint64 // entries removed after their expiry
	Discarded   uint64 // entries that clients discarded
	OverBudget  uint64 // puts refused because of the daily write budget
	Evictions   uint64 // entries
	Sheds       uint64 // puts that found no room
	Damaged     uint64 // entries dropped because of a bad file
	Vanished    uint64 // files removed by another program
	PlaceFaults uint64 // names that a place policy gave and that could not be used
	Recovered   uint64 // pieces found at the start
}

// flight is the activity on the files of an entry.
type flight struct {
	ranks     uint64 // pieces that are being written
	copies    uint64 // subset of ranks that are copied from another level
	unlinking bool   // files are being unlinked
}

// with returns the flight with one more piece that is being written.
func (f flight) with(rank uint32, copied bool) flight {
	f.ranks |= 1 << rank
	if copied {
		f.copies |= 1 << rank
	}
	return f
}

// flights holds the activities by the slot of the entry.
type flights map[uint32]flight

func (f flights) set(slot uint32, to flight) {
	if to == (flight{}) {
		delete(f, slot)
		return
	}
	f[slot] = to
}

// Mark identifies an entry. It does not match a later entry in the same slot.
type Mark struct {
	Slot        uint32
	Fingerprint uint64
}

// Init initializes an empty set. [Set.StartEvictor] must follow.
func (s *Set) Init(cfg Config) {
	s.cfg, s.Account, s.flights = cfg, cfg.Account, flights{}
	s.Index = index.New(cfg.MaxEntries, cfg.Catalog.Fingerprint, cfg.Catalog.Base)
	s.reaped.L, s.Moves.Set = &s.Mutex, s
}

// StartEvictor starts the evict policy. It fills in the fields of cfg that come from the set.
func (s *Set) StartEvictor(ctx context.Context, cfg evictor.Config) (err error) {
	cfg.Index, cfg.Lock, cfg.Host, cfg.Size.Slots = s.Index, &s.Mutex, evictorHost{s}, s.cfg.MaxEntries
	s.Evictor, err = evictor.New(ctx, cfg)
	return err
}

// evictorHost is the interface of the evictor to its set.
type evictorHost struct{ *Set }

func (h evictorHost) Tenant(number uint16) uint32 { return h.cfg.Catalog.Tenants.Tenant(number) }
func (h evictorHost) Clock() uint64               { return h.cfg.Clock() }
func (h evictorHost) Used() int64                 { return h.Account.Figures().Used }

// Counted adds one to a counter. It takes the lock.
func (s *Set) Counted(n *uint64) {
	s.Lock()
	*n++
	s.Unlock()
}

func (s *Set) ClassOf(slot uint32) *catalog.Class {
	return s.cfg.Catalog.Class(s.Index.Owner(slot).Class)
}

func (s *Set) TenantOf(slot uint32) uint32 {
	return s.cfg.Catalog.Tenants.Tenant(s.Index.Owner(slot).Tenant)
}

// Stands reports whether a mark still matches a live entry.
func (s *Set) Stands(m Mark) bool {
	if m.Slot >= s.Index.High() {
		return false
	}
	e := s.Index.At(m.Slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && s.Index.Fingerprint(m.Slot) == m.Fingerprint
}

// Busy reports whether pieces of an entry are being written or unlinked.
func (s *Set) Busy(slot uint32) bool {
	_, busy := s.flights[slot]
	return busy
}

// Unused reports whether an entry is used by nothing except copies from or to another level, which end if it is removed.
func (s *Set) Unused(slot uint32) bool {
	e, copies := s.Index.At(slot), uint8(bits.OnesCount64(s.flights[slot].copies))
	if m := s.Moves.of[slot]; m != nil {
		copies += m.pins
	}
	return e.Is(index.Live) && !e.Any(index.Evicting|index.Detached) && e.Pins() == copies
}

// InFlight returns the number of entries with pieces that are being written or unlinked.
func (s *Set) InFlight() int { return len(s.flights) }

// Complete returns the number of complete entries.
func (s *Set) Complete() int64 { return s.complete }

// Reach returns the maximum number of entries that [Raise] can allow. It takes the lock.
func Reach(s *Set) uint32 {
	s.Lock()
	defer s.Unlock()
	return s.Index.Reach()
}

// Raise raises the most entries that the set may have. It takes the lock.
func Raise(s *Set, most uint32) {
	s.Lock()
	defer s.Unlock()
	s.Index.Raise(most)
}

// Policy returns the evict policy in use, or the one that failed and is being restarted. It takes the lock.
func (s *Set) Policy() *evictor.Policy {
	s.Lock()
	defer s.Unlock()
	return s.Evictor.Active()
}

// Writing returns the bytes that are reserved by pieces being written.
func (s *Set) Writing() (bytes int64) {
	for slot, f := range s.flights {
		bytes += int64(bits.OnesCount64(f.ranks)) * s.ClassOf(slot).FileBytes()
	}
	return bytes
}

// Unwritten returns the bytes that are reserved for missing pieces, whether they are being written or not.
func (s *Set) Unwritten() (bytes int64) {
	for class, n := range s.Index.MissingByClass() {
		bytes += n * s.cfg.Catalog.Class(class).FileBytes()
	}
	return bytes
}

// ErrResident means that a piece exists or is being written by another put.
var ErrResident = errors.New("store: piece is resident")

// Has reports whether there is an entry in a state that is not being removed.
func (s *Set) Has(fp uint64, state uint8) bool {
	slot := s.Index.FindFingerprint(fp)
	return slot != index.None && s.Index.At(slot).Is(state) && !s.Index.At(slot).Is(index.Evicting)
}

// Continued reports whether an entry has the entry with this fingerprint as its parent.
func (s *Set) Continued(fp uint64) (continued bool) {
	s.Index.Children(fp, func(uint32) { continued = true })
	return continued
}

// Part returns an incomplete entry to which no put is adding and that can be evicted. It takes the lock.
func (s *Set) Part(fp uint64) (m Mark, ok bool) {
	s.Lock()
	defer s.Unlock()
	slot := s.Index.FindFingerprint(fp)
	ok = slot != index.None && !s.Index.At(slot).Is(index.Complete) && !s.Busy(slot) && s.Evictor.Evictable(slot)
	return Mark{slot, fp}, ok
}

// Marks returns all entries that are not being removed. It takes the lock.
func (s *Set) Marks() (list []Mark) {
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if !e.Is(index.Evicting) {
			list = append(list, Mark{slot, s.Index.Fingerprint(slot)})
		}
	})
	return list
}

// Pinned is a piece with a pin on its entry.
type Pinned struct {
	Class *catalog.Class
	Key   kv.Key
	Name  string // empty for the built-in name
}

// PinPiece adds a pin to a pinned entry, for loading one of its pieces or for copying it by the move m. It returns false if the
// entry is being removed or does not have the piece. Only p.Key is set then. It takes the lock.
func (s *Set) PinPiece(slot, rank uint32, m *Move) (p Pinned, ok bool) {
	s.Lock()
	defer s.Unlock()
	e := s.Index.At(slot)
	p.Key = s.Index.Key(slot)
	if e.Is(index.Evicting) || rank >= kv.MaxRanks || s.Index.Pieces(slot)&(1<<rank) == 0 {
		return p, false
	}
	s.Index.Pin(slot)
	if m != nil {
		m.pins++
	} else {
		s.Prefetched.loaded(slot)
	}
	p.Class = s.ClassOf(slot)
	if e.Is(index.Named) {
		p.Name = s.Index.NameOf(slot, rank)
	}
	return p, true
}

// PinCopy finds a complete copy of an entry, and pins it if wanted is set. prefetched reports whether a lookup requested the
// copy. It takes the lock.
func (s *Set) PinCopy(fp uint64, prefetched, wanted bool) (slot uint32, pinned bool) {
	s.Lock()
	defer s.Unlock()
	if !s.Has(fp, index.Complete) {
		return index.None, false
	}
	slot = s.Index.FindFingerprint(fp)
	if prefetched {
		s.Prefetched.Add(slot)
	}
	if wanted {
		s.Moves.Granted(slot, s.Index.At(slot), false)
		s.Evictor.Pin(slot, fp, 0)
	}
	return slot, wanted
}

// UnpinPiece ends the pin of a piece. It takes the lock.
func (s *Set) UnpinPiece(m Mark, by *Move) {
	s.Lock()
	defer s.Unlock()
	if by != nil {
		by.pins--
	}
	s.Unpin(m)
}

const (
	sweptSlots   = 1 << 16 // slots visited by one sweep
	sweptEntries = 256     // entries found by one sweep
)

// expire sets the expiry of an entry from its store time in nanoseconds since 1970. A store time in the future comes from a
// wrong clock and counts as now.
func (s *Set) expire(slot uint32, c *catalog.Class, stored int64) {
	at := int64(0)
	if c.Namespace.TTL > 0 {
		stored = min(stored, s.cfg.Now().UnixNano())
		at = (stored + int64(c.Namespace.TTL) + int64(time.Second) - 1) / int64(time.Second)
	}
	s.Index.Expiries.Set(slot, at)
}

// Expired reports whether an entry has expired at a time in seconds since 1970.
func (s *Set) Expired(slot uint32, now int64) bool {
	return s.Index.Expiries.Any() && s.Index.Expiries.Expired(slot, now)
}

// Renew finds the entry of a key and reports whether it has expired and has no reader. It then counts the entry as expired. It
// takes the lock.
func (s *Set) Renew(fp uint64, cl *catalog.Class, key *kv.Key) (m Mark, ok bool) {
	s.Lock()
	defer s.Unlock()
	slot := s.Index.Find(fp, cl.Base, key)
	if ok = slot != index.None && s.Expired(slot, s.cfg.Now().Unix()) && s.Evictor.Evictable(slot); ok {
		s.Count.Expired++
	}
	return Mark{slot, fp}, ok
}

// SweepExpired finds a bounded number of expired entries without readers. An entry that would expire later than a new one was
// stored with a wrong clock, so its time to live starts again. It takes the lock.
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

// Check verifies the index against itself and against the account, given the bytes in quarantine. It visits every entry.
func (s *Set) Check(quarantine int64) error {
	if err := s.Index.Check(); err != nil {
		return err
	}
	var complete, leaving int64
	var tenants []int64
	for slot := range s.Index.High() {
		e := s.Index.At(slot)
		if !e.Is(index.Live) {
			continue
		}
		tenant := int(s.Index.Owner(slot).Tenant)
		for tenant >= len(tenants) {
			tenants = append(tenants, 0)
		}
		tenants[tenant] += s.Index.Bytes(slot)
		if e.Is(index.Evicting) {
			leaving += s.Index.Bytes(slot)
		}
		if e.Is(index.Detached) {
			continue
		}
		if e.Is(index.Complete) && !e.Is(index.Evicting) {
			complete++
		}
		f, busy := s.flights[slot]
		if !e.Is(index.Evicting) && s.Index.Pieces(slot) == 0 && f.ranks == 0 {
			return fmt.Errorf("slot %d has no piece, and none is written", slot)
		}
		if busy && int(e.Pins()) < bits.OnesCount64(f.ranks) {
			return fmt.Errorf("slot %d has %d pins and %d writers", slot, e.Pins(), bits.OnesCount64(f.ranks))
		}
	}
	if err := s.Moves.check(); err != nil {
		return err
	}
	if complete != s.complete {
		return fmt.Errorf("%d complete entries, the count says %d", complete, s.complete)
	}
	return s.Account.Check(tenants, leaving, quarantine)
}

// Census counts the bytes that are reserved for missing pieces, and the entries that are pinned, being written or being
// removed. It visits every entry.
func (s *Set) Census() (missing int64, inUse int) {
	inUse = len(s.flights)
	s.Index.Each(func(slot uint32, e *index.Entry) {
		missing += int64(bits.OnesCount64(s.Index.Missing(slot))) * s.ClassOf(slot).FileBytes()
		if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
			inUse++
		}
	})
	return missing, inUse
}
