package store

import (
	"math"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// RootStats is the state of one root. What counts up does so since the store was opened.
type RootStats struct {
	Path      string
	State     health.State
	Reason    string        // why it is not in
	Ceiling   time.Duration // until a root that is full looks for room again
	Since     time.Time     // that it is in this state; zero from the start
	Outages   uint64        // times that it was taken out
	Stuck     int           // operations that were given up and have not ended
	Capacity  int64
	Limit     int64 // what it may take at present: less than Capacity by directories, and where the file system has less
	Used      int64 // all of the following, and entries on their way out
	Writing   int64 // reserved by pieces in flight: temporaries
	Held      int64 // of quarantine
	Orphaned  int64 // of files that could not be unlinked
	Unscanned int64 // most that files may take which the scan has not come to

	Entries    int // in the index, complete or not
	Complete   int64
	Slots      uint32 // ever used
	MaxEntries uint32
	IndexBytes int64

	entries.Counters
	Written     int64  // bytes counted today against the daily write budget; 0 without one
	Asks        uint64 // times that victims were asked for
	BadVictims  uint64 // named by the policy although pinned, in flight or gone
	Unanswered  uint64 // questions in which the policy named no evictable entry, although there was one
	Quarantined uint64 // files
	SyncFails   uint64
	EvictFaults uint64 // evict policies replaced
	Scanning    bool   // the scan at the start has not ended; what it has not come to is a miss
	Scanned     uint64 // files that it has come to
	Swept       uint64 // temporaries removed at the start
	Foreign     uint64 // files at the start that are not the store's; left alone
	Unclaimed   uint64 // sound pieces at the start that no name leads to; quarantined

	Least float64 // ratio from which on chunks are compressed; infinite: none is
	Why   string  // what that was measured by; empty: nothing is measured

	Shared *shared.Stats // nil unless hosts share the root

	Evict policy.Stats
}

// Stats is the state of a store.
type Stats struct {
	Roots    []RootStats
	Levels   []LevelStats // nearest first
	Refused  uint64       // puts that admission refused
	Resident uint64       // puts of what was there already
	Lookups  uint64
	Keys     uint64 // looked up
	Hits     uint64 // keys granted

	Policies []PolicyStats // those that act, by role
	Shadows  []ShadowStats
}

type ShadowStats struct {
	shadow.Stats
	Name    string
	Version string
	Since   time.Time
}

// PolicyStats is a policy that is in use.
type PolicyStats struct {
	policy.Stats
	Name       string
	Version    string
	Root       string // of evict
	Since      time.Time
	Quarantine error            // why it is not started any more
	Counters   map[string]int64 // the module's own, of all its instances and roles
}

// LevelStats is what a level tells: what lookups found there, and what was copied there from other levels.
type LevelStats struct {
	Level  int
	Hits   uint64 // keys granted
	Loaded uint64 // bytes of pieces that were opened for loads
	// Of what the level holds in memory: the entries, and those of them that another level has too, which outlive the host.
	Volatile, Kept uint64
	Moves          [moves.Kinds]MoveStats

	Published        uint64 // pieces, new ones and copies
	PrefetchesUsed   uint64 // copies that a lookup asked for, and that were loaded afterwards
	PrefetchesWasted uint64 // copies that went without
}

// MoveStats are the copies of one kind to a level.
type MoveStats struct {
	Done      uint64
	Bytes     uint64
	Shed      uint64 // not made, because too many were waiting or there was no time
	Refused   uint64 // not wanted
	Cancelled uint64 // not wanted any more, or there already
	Failed    uint64 // faults, and no room
}

// Stats may be called at any time.
func (s *Store) Stats() Stats {
	st := Stats{
		Refused: s.count.refused.Load(), Resident: s.count.resident.Load(), Lookups: s.count.lookups.Load(),
		Keys: s.count.keys.Load(), Hits: s.count.hits.Load(),
	}
	for _, r := range s.roots {
		st.Roots = append(st.Roots, r.stats())
	}
	for _, l := range s.levels {
		f := LevelStats{Level: l.number, Hits: l.hits.Load(), Loaded: l.loaded.Load()}
		for i, r := range l.roots {
			f.Published += st.Roots[l.places[i]].Published
			f.PrefetchesUsed += r.Prefetched.Used.Load()
			f.PrefetchesWasted += r.Prefetched.Wasted.Load()
		}
		f.Volatile, f.Kept = l.kept()
		for kind := range l.count {
			c := &l.count[kind]
			f.Moves[kind] = MoveStats{
				Done: c.Done.Load(), Bytes: c.Bytes.Load(), Shed: c.Shed.Load(), Refused: c.Refused.Load(),
				Cancelled: c.Cancelled.Load(), Failed: c.Failed.Load(),
			}
		}
		st.Levels = append(st.Levels, f)
	}
	st.Policies = s.policyStats(st.Roots)
	for _, t := range s.shadows.List() {
		st.Shadows = append(st.Shadows, ShadowStats{
			Stats: t.Shadow.Stats(), Name: t.Label, Version: t.Module.Manifest().Version, Since: t.Since,
		})
	}
	return st
}

// kept counts the entries that the level has in memory, and those of them that another level has too, which outlive the host.
func (l *level) kept() (volatile, kept uint64) {
	for _, r := range l.roots {
		if r.cfg.Volatile {
			r.Lock()
			volatile += uint64(r.Complete())
			r.Unlock()
		}
	}
	if volatile > 0 && l.store.copies != nil {
		kept = min(volatile, uint64(l.store.copies.Kept()))
	}
	return volatile, kept
}

// Compression is what compression has taken and gained, by model.
func (s *Store) Compression() []codec.Figures { return s.catalog.Compression.Figures() }

func (s *Store) policyStats(roots []RootStats) (list []PolicyStats) {
	add := func(h *policy.Handle, since time.Time, st policy.Stats, root string) *PolicyStats {
		list = append(list, PolicyStats{
			Stats: st, Name: h.Label, Version: h.Module.Manifest().Version, Root: root, Since: since,
			Quarantine: h.Module.Quarantined(), Counters: h.Module.Counters(),
		})
		return &list[len(list)-1]
	}
	for i, r := range s.roots {
		p := r.Policy()
		add(p.Handle, p.Since, roots[i].Evict, r.Path)
	}
	s.catalog.EachPolicy(func(p catalog.PolicyInfo) {
		add(p.Handle, p.Since, p.Stats, "")
	})
	return list
}

func (r *root) stats() RootStats {
	r.Lock()
	defer r.Unlock()
	n, a, ev := &r.recovery.count, r.Account.Figures(), r.Evictor.Counts()
	st := RootStats{
		Path: r.Path, Capacity: a.Capacity, Limit: a.Limit, Ceiling: a.Ceiling,
		Used: a.Used, Held: a.Quarantine, Orphaned: a.Orphans, Unscanned: a.Unscanned,
		Entries: int(r.Index.Len()), Complete: r.Complete(), Slots: r.Index.High(), MaxEntries: r.Index.Max(),
		IndexBytes: r.Index.Memory(),
		Counters:   r.Count, Asks: ev.Asks, BadVictims: ev.BadVictims, Unanswered: ev.Unanswered, EvictFaults: ev.Faults,
		Quarantined: r.Quarantine.Count(), SyncFails: r.SyncFails.Load(),
		Scanning: r.Scanning(), Scanned: n.Scanned.Load(),
		Swept: n.Swept.Load(), Foreign: n.Foreign.Load(), Unclaimed: n.Unclaimed.Load(),
		Evict: r.Evictor.Stats(),
	}
	if st.Least = math.Inf(1); r.meter.gain != nil {
		st.Least, st.Why = r.meter.gain.Least(), r.meter.gain.Why()
	} else if r.cfg.Compressed {
		st.Least = codec.Always
	}
	h := r.Health.Report()
	st.State, st.Reason, st.Since, st.Outages = h.State, h.Reason, h.Since, h.Outages
	st.Written = r.budget.Spent()
	st.Stuck = r.Health.Stuck()
	st.Writing = r.Writing()
	if c, ok := r.owner.(*joint); ok {
		st.Shared = c.stats()
	}
	return st
}
