package store

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec/choice"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/figures"
)

// What a store tells about itself.
type (
	RootStats   = figures.Root
	Stats       = figures.Store
	ShadowStats = figures.Shadow
	PolicyStats = figures.Policy
)

// storeCounters are the store's own.
type storeCounters struct {
	refused, resident, lookups, keys, hits, admitFaults atomic.Uint64
}

// Stats may be called at any time.
func (s *Store) Stats() Stats {
	st := Stats{
		Refused: s.count.refused.Load(), Resident: s.count.resident.Load(), Lookups: s.count.lookups.Load(),
		Keys: s.count.keys.Load(), Hits: s.count.hits.Load(),
		AdmitFaults: s.count.admitFaults.Load(),
	}
	for _, r := range s.roots {
		st.Roots = append(st.Roots, r.stats())
	}
	for _, l := range s.levels {
		f := figures.Level{Level: l.number, Hits: l.hits.Load(), Loaded: l.loaded.Load(), Around: l.around.Load()}
		for i, r := range l.roots {
			f.Published += st.Roots[l.places[i]].Published
			f.PrefetchesUsed += r.Prefetched.Used.Load()
			f.PrefetchesWasted += r.Prefetched.Wasted.Load()
		}
		for kind := range l.count {
			c := &l.count[kind]
			f.Moves[kind] = figures.Moves{
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

// Compression is what compression has taken and gained, by model.
func (s *Store) Compression() []choice.Figures { return s.catalog.Compression.Figures() }

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
	c, n, a, ev := &r.Count, &r.recovery.Count, r.Account.Figures(), r.Evictor.Counts()
	st := RootStats{
		Path: r.Path, Capacity: a.Capacity, Limit: a.Limit,
		Used: a.Used, Held: a.Quarantine, Orphaned: a.Orphans, Unscanned: a.Unscanned,
		Entries: int(r.Index.Len()), Complete: r.Complete(), Slots: r.Index.High(), MaxEntries: r.Index.Max(),
		IndexBytes: r.Index.Memory(),
		Inserted:   c.Inserted, Published: c.Published, Aborted: c.Aborted, Recycled: c.Recycled,
		Expired: c.Expired, Discarded: c.Discarded, OverBudget: c.OverBudget, Waits: c.Waits, Sheds: c.Sheds,
		Evictions: c.Evictions, Asks: ev.Asks, BadVictims: ev.BadVictims, Unanswered: ev.Unanswered, EvictFaults: ev.Faults,
		Damaged: c.Damaged, Vanished: c.Vanished, Quarantined: r.Quarantine.Count(),
		SyncFails: r.SyncFails.Load(), PlaceFaults: c.PlaceFaults,
		Scanning: r.Scanning(), Scanned: n.Scanned.Load(), Recovered: c.Recovered,
		Swept: n.Swept.Load(), Foreign: n.Foreign.Load(), Unclaimed: n.Unclaimed.Load(),
		Shared: r.kind.stats(), Evict: r.Evictor.Stats(),
	}
	if st.Least = math.Inf(1); r.meter.gain != nil {
		st.Least, st.Why = r.meter.gain.Least(), r.meter.gain.Why()
	} else if r.cfg.Compressed {
		st.Least = choice.Always
	}
	h := r.Health.Report()
	st.State, st.Reason, st.Since, st.Outages = h.State, h.Reason, h.Since, h.Outages
	st.Written = r.budget.Spent()
	st.Stuck = r.Health.Stuck()
	st.Writing = r.Writing()
	return st
}
