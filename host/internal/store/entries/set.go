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
	Copies     *Copies // of all roots; nil: there is only one
	Volatile   bool    // what it holds is lost at the end
	Now        func() time.Time
	Clock      func() uint64 // the time of events
}

// Set is the entries of one root.
type Set struct {
	sync.Mutex
	Index   *index.Index
	Evictor *evictor.Evictor
	Account *capacity.Account
	Count   Counters
	Moves   Moves
	Hits    Hits
	// Prefetched are the copies that came here because a lookup asked for them.
	Prefetched Prefetched
	// Touched receives the fingerprints of entries that lookups touch; may be nil.
	Touched func(fp uint64)

	cfg      Config
	reaped   sync.Cond // an evicted entry is out of the table, or its slot is free
	flights  flights
	complete int64 // entries with all their pieces
	scanning bool
	// removed are the fingerprints of entries that were removed while the scan ran.
	removed map[uint64]struct{}
}

// Counters count since the store was opened.
type Counters struct {
	Published   uint64 // pieces
	Aborted     uint64 // pieces
	Recycled    uint64 // files of victims that became the temporaries of puts
	Expired     uint64 // entries removed because their time was over
	Discarded   uint64 // entries that clients discarded
	OverBudget  uint64 // puts refused for the daily write budget
	Evictions   uint64 // entries
	Sheds       uint64 // puts that found no space
	Damaged     uint64 // entries dropped because a file was not what it should be
	Vanished    uint64 // files removed by another program
	PlaceFaults uint64 // names that the file of another key held
	Recovered   uint64 // pieces found at the start
}

// flight is what happens to an entry's files now.
type flight struct {
	ranks     uint64 // pieces that are being written
	copies    uint64 // those of them that are copied from another level
	unlinking bool   // its files are being unlinked
}

// with is the flight with another piece that is being written.
func (f flight) with(rank uint32, copied bool) flight {
	f.ranks |= 1 << rank
	if copied {
		f.copies |= 1 << rank
	}
	return f
}

// flights are by the entries' slots.
type flights map[uint32]flight

func (f flights) set(slot uint32, to flight) {
	if to == (flight{}) {
		delete(f, slot)
		return
	}
	f[slot] = to
}

// Mark names an entry so that a later one in the same slot is told apart.
type Mark struct {
	Slot        uint32
	Fingerprint uint64
}

// Init makes an empty set. [Set.StartEvictor] completes it.
func (s *Set) Init(cfg Config) {
	s.cfg, s.Account, s.flights = cfg, cfg.Account, flights{}
	s.Index = index.New(cfg.MaxEntries, cfg.Catalog.Fingerprint, cfg.Catalog.Base)
	s.reaped.L, s.Moves.Set = &s.Mutex, s
}

// StartEvictor starts the evict policy. What the evictor has from the set need not be given.
func (s *Set) StartEvictor(ctx context.Context, cfg evictor.Config) (err error) {
	cfg.Index, cfg.Lock, cfg.Host, cfg.Size.Slots = s.Index, &s.Mutex, evictorHost{s}, s.cfg.MaxEntries
	s.Evictor, err = evictor.New(ctx, cfg)
	return err
}

// evictorHost is what the evictor needs of its set.
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

// Stands says whether a mark still names a live entry.
func (s *Set) Stands(m Mark) bool {
	if m.Slot >= s.Index.High() {
		return false
	}
	e := s.Index.At(m.Slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && s.Index.Fingerprint(m.Slot) == m.Fingerprint
}

// Busy says whether pieces of an entry are being written or unlinked.
func (s *Set) Busy(slot uint32) bool {
	_, busy := s.flights[slot]
	return busy
}

// Unused says whether nothing has an entry but copies from or to another level, which end without it.
func (s *Set) Unused(slot uint32) bool {
	e, copies := s.Index.At(slot), uint8(bits.OnesCount64(s.flights[slot].copies))
	if m := s.Moves.of[slot]; m != nil {
		copies += m.pins
	}
	return e.Is(index.Live) && !e.Any(index.Evicting|index.Detached) && e.Pins() == copies
}

// InFlight is how many entries have pieces that are being written or unlinked.
func (s *Set) InFlight() int { return len(s.flights) }

// Complete is how many entries have all their pieces.
func (s *Set) Complete() int64 { return s.complete }

// Reach is how many entries there can be at most, after [Raise]. It takes the lock.
func Reach(s *Set) uint32 {
	s.Lock()
	defer s.Unlock()
	return s.Index.Reach()
}

// Raise lets there be more entries. It takes the lock.
func Raise(s *Set, most uint32) {
	s.Lock()
	defer s.Unlock()
	s.Index.Raise(most)
}

// Policy is what decides here, or did until it failed. It takes the lock.
func (s *Set) Policy() *evictor.Policy {
	s.Lock()
	defer s.Unlock()
	return s.Evictor.Active()
}

// Writing is the bytes reserved by pieces that are being written.
func (s *Set) Writing() (bytes int64) {
	for slot, f := range s.flights {
		bytes += int64(bits.OnesCount64(f.ranks)) * s.ClassOf(slot).FileBytes()
	}
	return bytes
}

// Unwritten is the bytes reserved for pieces that are not there, whether they are being written or not.
func (s *Set) Unwritten() (bytes int64) {
	for class, n := range s.Index.MissingByClass() {
		bytes += n * s.cfg.Catalog.Class(class).FileBytes()
	}
	return bytes
}

// ErrResident says that a piece is there already, or is being written by another put.
var ErrResident = errors.New("store: piece is resident")

// Has says whether there is an entry in a state that is not being removed.
func (s *Set) Has(fp uint64, state uint8) bool {
	slot := s.Index.FindFingerprint(fp)
	return slot != index.None && s.Index.At(slot).Is(state) && !s.Index.At(slot).Is(index.Evicting)
}

// Continued says whether an entry has the one of a fingerprint as its parent.
func (s *Set) Continued(fp uint64) (continued bool) {
	s.Index.Children(fp, func(uint32) { continued = true })
	return continued
}

// Part is an entry that is not complete, that no put adds to and that can be evicted. It takes the lock.
func (s *Set) Part(fp uint64) (m Mark, ok bool) {
	s.Lock()
	defer s.Unlock()
	slot := s.Index.FindFingerprint(fp)
	ok = slot != index.None && !s.Index.At(slot).Is(index.Complete) && !s.Busy(slot) && s.Evictor.Evictable(slot)
	return Mark{slot, fp}, ok
}

// Marks are all entries that are not being removed. It takes the lock.
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

// Pinned is a piece of an entry that has a pin for it.
type Pinned struct {
	Class *catalog.Class
	Key   kv.Key
	Name  string // empty: the built-in one
}

// PinPiece pins an entry that has another pin, for one of its pieces, which is loaded, or copied by a move. There is none
// where the entry is being removed, or has not got the piece: then Key alone is set. It takes the lock.
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

// PinCopy finds a complete copy of an entry and pins it if it is wanted. Prefetched says that a lookup asked for the copy.
// It takes the lock.
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

// UnpinPiece takes the pin of a piece back. It takes the lock.
func (s *Set) UnpinPiece(m Mark, by *Move) {
	s.Lock()
	defer s.Unlock()
	if by != nil {
		by.pins--
	}
	s.Unpin(m)
}

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

// SweepExpired finds a bounded number of entries that have expired and have no readers. An entry that would expire
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

// Check compares the index with itself and with the account, given the bytes in quarantine. It looks at every entry.
func (s *Set) Check(quarantine int64) error {
	if err := s.Index.Check(); err != nil {
		return err
	}
	var complete int64
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
	return s.Account.Check(tenants, quarantine)
}

// Census counts the bytes reserved for pieces that are not there, entry by entry, and the entries that are pinned,
// being written or being removed.
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
