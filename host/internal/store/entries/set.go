package entries

import (
	"context"
	"math/bits"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Config makes a set.
type Config struct {
	MaxEntries uint32
	Account    *capacity.Account
	Catalog    *catalog.Catalog
	Changes    *ChangeLog
	Copies     *Copies // of all roots; nil: there is only one
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
	// Touched receives the fingerprints of entries that lookups touch; nil: nobody wants them.
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
	Inserted    uint64 // entries reserved
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
	unlinking bool   // its files are being unlinked
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

// ClassOf is an entry's class.
func (s *Set) ClassOf(slot uint32) *catalog.Class {
	return s.cfg.Catalog.Class(s.Index.Owner(slot).Class)
}

// TenantOf is an entry's tenant.
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

// Unwritten is the bytes reserved for pieces that are not there, whether somebody is writing them or not.
func (s *Set) Unwritten() (bytes int64) {
	for class, n := range s.Index.MissingByClass() {
		bytes += n * s.cfg.Catalog.Class(class).FileBytes()
	}
	return bytes
}
