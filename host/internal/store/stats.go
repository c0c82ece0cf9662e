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

// RootStats is the state of one root. Counters count since the store was opened.
type RootStats struct {
	Path      string
	State     health.State
	Reason    string        // why it is not in full service
	Ceiling   time.Duration // time until a full root checks for room again
	Since     time.Time     // time of the last change of state; zero if there was none
	Outages   uint64        // times that it was taken out
	Stuck     int           // abandoned operations that have not ended
	Capacity  int64
	Limit     int64 // bytes that it may use at present; less than Capacity because of directories, or if the file system has less
	Used      int64 // bytes of the following parts and of entries
	Writing   int64 // bytes reserved by pieces being written
	Held      int64 // bytes of quarantine
	Orphaned  int64 // bytes of files that could not be unlinked
	Unscanned int64 // upper bound of the bytes in files that the scan has not seen

	Entries    int // entries in the index, complete or not
	Complete   int64
	Slots      uint32 // slots ever used
	MaxEntries uint32
	IndexBytes int64

	entries.Counters
	Written     int64  // bytes written today, as counted against the daily write budget; 0 without one
	Asks        uint64 // times that the policy was asked for victims
	BadVictims  uint64 // victims named by the policy that were pinned, in flight or gone
	Unanswered  uint64 // times that the policy named no evictable entry although there was one
	Quarantined uint64 // files moved to quarantine
	SyncFails   uint64
	EvictFaults uint64 // times that a failed evict policy was replaced
	Scanning    bool   // the scan at the start has not ended; unseen pieces are misses
	Scanned     uint64 // files that the scan has seen
	Swept       uint64 // temporaries removed at the start
	Foreign     uint64 // files found at the start that do not belong to the store; left alone
	Unclaimed   uint64 // valid pieces found at the start without a namespace or a valid name; quarantined

	Least float64 // ratio from which chunks are compressed; infinite if none are
	Why   string  // basis of Least; empty if nothing is measured

	Shared *shared.Stats // nil unless the root is shared

	Evict policy.Stats
}

// Stats is the state of a store.
type Stats struct {
	Roots    []RootStats
	Levels   []LevelStats // nearest first
	Refused  uint64       // puts that the admit policy refused
	Resident uint64       // puts of resident pieces
	Lookups  uint64
	Keys     uint64 // keys looked up
	Hits     uint64 // keys granted

	Policies []PolicyStats // policies in use, by role
	Shadows  []ShadowStats
}

type ShadowStats struct {
	shadow.Stats
	Name    string
	Version string
	Since   time.Time
}

// PolicyStats describes a policy in use.
type PolicyStats struct {
	policy.Stats
	Name       string
	Version    string
	Root       string // root that the evict policy serves; empty for other policies
	Since      time.Time
	Quarantine error            // why the module is not started any more; nil if it is
	Counters   map[string]int64 // counters of the module, over all instances and roles
}

// LevelStats counts the hits in a level and the copies to it from other levels.
type LevelStats struct {
	Level  int
	Hits   uint64 // keys granted
	Loaded uint64 // bytes of pieces that were opened for loads
	// Volatile is the number of entries that the level has in memory. Kept is the part of them with a copy in another level,
	// which outlives the host.
	Volatile, Kept uint64
	Moves          [moves.Kinds]MoveStats

	Published        uint64 // pieces, both new and copied
	PrefetchesUsed   uint64 // copies requested by a lookup that were loaded afterwards
	PrefetchesWasted uint64 // copies requested by a lookup that were removed without a load
}

// MoveStats counts the copies of one kind to a level.
type MoveStats struct {
	Done      uint64
	Bytes     uint64
	Shed      uint64 // not made, because too many were waiting or there was no time
	Refused   uint64 // not wanted by the policy
	Cancelled uint64 // no longer wanted, or made already
	Failed    uint64 // failed because of a fault or lack of room
}

// Stats returns the state of the store. It may be called at any time.
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

// Compression returns the cost and the effect of compression by model.
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
