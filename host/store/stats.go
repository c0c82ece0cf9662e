package store

import (
	"math/bits"

	"github.com/kvhost/kvhost/host/policy"
)

// counters of one root, guarded by its mutex.
type counters struct {
	inserted, published, aborted, recycled        uint64
	evictions, asks, badVictims, sheds            uint64
	damaged, quarantined, vanished, syncFails     uint64
	placeFaults, policyFaults                     uint64
	swept, foreign, recovered, renamed, unclaimed uint64
}

// RootStats is the state of one root. What counts up does so since the store was opened.
type RootStats struct {
	Path     string
	Capacity int64
	Used     int64 // all of the following, and entries on their way out
	Writing  int64 // reserved by pieces in flight: temporaries
	Held     int64 // of quarantine
	Stray    int64 // of files that could not be unlinked

	Entries    int // in the index, complete or not
	Complete   int64
	Slots      uint32 // ever used
	MaxEntries uint32
	IndexBytes int64

	Inserted    uint64 // entries reserved
	Published   uint64 // pieces
	Aborted     uint64 // pieces
	Recycled    uint64 // victims' files that became the temporaries of puts
	Evictions   uint64 // entries
	Asks        uint64 // times that victims were asked for
	BadVictims  uint64 // named by the policy although pinned, in flight or gone
	Sheds       uint64 // puts that found no space
	Damaged     uint64 // entries dropped because a file was not what it should be
	Vanished    uint64 // files removed by somebody else
	Quarantined uint64 // files
	SyncFails   uint64
	PlaceFaults uint64 // names that another key's file held
	EvictFaults uint64 // evict policies replaced
	Recovered   uint64 // pieces found at the start
	Renamed     uint64 // pieces at the start that an earlier place policy had named
	Swept       uint64 // temporaries removed at the start
	Foreign     uint64 // files at the start that are not the store's; left alone
	Unclaimed   uint64 // sound pieces at the start that no name leads to; quarantined

	Evict policy.Stats
}

// Stats is the state of the store.
type Stats struct {
	Roots    []RootStats
	Refused  uint64 // puts that admission refused
	Resident uint64 // puts of what was there already
	Lookups  uint64
	Keys     uint64 // looked up
	Hits     uint64 // keys granted

	Admit, Place, Layout policy.Stats
	AdmitFaults          uint64
}

// Stats may be called at any time.
func (s *Store) Stats() Stats {
	st := Stats{
		Refused: s.refused.Load(), Resident: s.resident.Load(), Lookups: s.lookups.Load(), Keys: s.keys.Load(), Hits: s.hits.Load(),
		Admit: s.admit.Stats(), Place: s.names.place.Stats(), Layout: s.layout.Stats(), AdmitFaults: s.admitFaults.Load(),
	}
	for _, r := range s.roots {
		st.Roots = append(st.Roots, r.stats())
	}
	return st
}

func (r *root) stats() RootStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &r.count
	st := RootStats{
		Path: r.dir, Capacity: r.cfg.Capacity, Used: r.used, Held: r.quar.bytes, Stray: r.stray,
		Entries: int(r.x.used), Complete: r.complete, Slots: r.x.high, MaxEntries: r.x.max, IndexBytes: r.x.bytes(),
		Recycled: c.recycled, Inserted: c.inserted, Published: c.published, Aborted: c.aborted, Evictions: c.evictions, Asks: c.asks,
		BadVictims: c.badVictims, Sheds: c.sheds, Damaged: c.damaged, Vanished: c.vanished, Quarantined: c.quarantined,
		SyncFails: c.syncFails, PlaceFaults: c.placeFaults, EvictFaults: c.policyFaults, Recovered: c.recovered,
		Swept: c.swept, Renamed: c.renamed, Foreign: c.foreign, Unclaimed: c.unclaimed,
		Evict: addStats(r.faulted, r.evict.Stats()),
	}
	st.Evict.Builtin = r.standin
	for slot, f := range r.flights {
		st.Writing += int64(bits.OnesCount64(f.ranks)) * r.store.spaces.class(r.x.at(slot).class).fileBytes()
	}
	return st
}

// addStats is b with a's counts on top.
func addStats(a, b policy.Stats) policy.Stats {
	b.Calls += a.Calls
	b.Records += a.Records
	b.Time += a.Time
	b.Fuel += a.Fuel
	b.Faults += a.Faults
	return b
}
