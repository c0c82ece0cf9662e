package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// LevelResult is the outcome of one policy, one admission and one way to write on one workload.
type LevelResult struct {
	Trace          string  `json:"trace"`
	Policy         string  `json:"policy"`
	Admit          string  `json:"admit"`
	Write          string  `json:"write"`
	ChunkBytes     int64   `json:"chunk_bytes"`
	Accesses       int     `json:"accesses"`
	Hits           int     `json:"hits"` // in any level
	MissRatio      float64 `json:"miss_ratio"`
	PrefixHits     int     `json:"prefix_hits"` // contiguous from a request's start: these are loaded
	PrefixHitRatio float64 `json:"prefix_hit_ratio"`
	Refused        int     `json:"refused"` // new chunks that the admit policy did not want
	BytesLoaded    int64   `json:"bytes_loaded"`
	BytesWritten   int64   `json:"bytes_written"` // in all levels

	RecomputeSeconds float64 `json:"recompute_seconds"`     // prefill of everything
	PrefillSeconds   float64 `json:"prefill_seconds_saved"` // prefill of what is loaded instead
	LoadSeconds      float64 `json:"load_seconds"`          // what the loads take
	SavedSeconds     float64 `json:"seconds_saved"`         // prefill saved, less the loads
	// What the loads would take from the farthest level, less what they do take.
	FartherSeconds float64 `json:"farthest_seconds_saved"`
	// Of requests that load; prefetched as if all had come to the nearest level while they waited.
	LoadTimes       Times   `json:"load_times"`
	PrefetchedTimes Times   `json:"load_times_prefetched"`
	Seconds         float64 `json:"seconds"` // that the simulation took

	Levels []LevelFigures `json:"levels"`
}

// LevelFigures are what happened in one level. What came into it: New, Demotions, Promotions; each was written.
type LevelFigures struct {
	Level        int   `json:"level"`
	Capacity     int   `json:"capacity"` // chunks
	Hits         int   `json:"hits"`
	Loads        int   `json:"loads"` // hits that continue a prefix
	New          int   `json:"new"`
	Demotions    int   `json:"demotions"`
	Promotions   int   `json:"promotions"`
	Covered      int   `json:"covered"` // evicted, while the next level had a copy
	Drops        int   `json:"drops"`   // evicted, and not demoted
	Shed         int   `json:"shed"`    // not stored, because the policy freed too little
	BytesLoaded  int64 `json:"bytes_loaded"`
	BytesWritten int64 `json:"bytes_written"`
	LoadTimes    Times `json:"load_times"` // of requests that load from the level
}

// LevelGrid is every policy with every admission and way to write, on every workload.
type LevelGrid struct {
	Workloads  []*Workload
	Policies   []*Policy
	Admissions []*Policy
	Writes     []Write
	Levels     []Level
	ChunkBytes int64
	Options    Options
}

// rows are the runs on one workload.
func (g *LevelGrid) rows() int { return len(g.Policies) * len(g.Admissions) * len(g.Writes) }

// Accesses is the number of accesses of all runs together.
func (g *LevelGrid) Accesses() (n int64) {
	for _, w := range g.Workloads {
		n += int64(w.Accesses())
	}
	return n * int64(g.rows())
}

// LevelOutcome is a grid's results.
type LevelOutcome struct {
	Results []LevelResult // by workload, then policy, then admission, then way to write
	grid    *LevelGrid
}

// Run does all runs.
func (g *LevelGrid) Run(ctx context.Context) (*LevelOutcome, error) {
	for _, p := range g.Policies {
		if p.module == nil {
			return nil, fmt.Errorf("%w: %s knows the future or needs no room, and has no levels", ErrPolicy, p.Text)
		}
	}
	results, err := runAll(ctx, len(g.Workloads)*g.rows(), func(ctx context.Context, i int) (LevelResult, error) {
		p, a, write := g.cell(i % g.rows())
		return g.run(ctx, g.Workloads[i/g.rows()], p, a, write)
	})
	return &LevelOutcome{results, g}, err
}

// cell is what runs in a row.
func (g *LevelGrid) cell(row int) (p, a *Policy, w Write) {
	rest := row / len(g.Writes)
	return g.Policies[rest/len(g.Admissions)], g.Admissions[rest%len(g.Admissions)], g.Writes[row%len(g.Writes)]
}

func (g *LevelGrid) run(ctx context.Context, w *Workload, p *Policy, a *Policy, write Write) (LevelResult, error) {
	r := LevelResult{
		Trace: w.Name, Policy: p.Text, Admit: a.Text, Write: write.String(), ChunkBytes: g.ChunkBytes,
	}
	started := time.Now()
	h, err := g.open(ctx, w, p, a, write)
	if err != nil {
		return r, err
	}
	defer h.close()
	if r.PrefixHits, r.PrefillSeconds, err = w.play(ctx, &g.Options, r.Policy, h.request); err != nil {
		return r, err
	}
	for n := range h.levels {
		if err := h.levels[n].e.Flush(); err != nil {
			return r, fmt.Errorf("sim: %s: level %d: %w", r.Policy, n, err)
		}
	}
	r.Accesses, r.RecomputeSeconds = w.Accesses(), g.Options.Prefill.total(w)
	r.count(h, g)
	r.Seconds = time.Since(started).Seconds()
	return r, nil
}

// count adds up what the levels counted.
func (r *LevelResult) count(h *hierarchy, g *LevelGrid) {
	r.Refused = h.refused
	for n := range h.levels {
		f := h.levels[n].figures
		f.Shed = h.levels[n].shed
		f.BytesLoaded = int64(f.Loads) * g.ChunkBytes
		f.BytesWritten = int64(f.New+f.Demotions+f.Promotions) * g.ChunkBytes
		r.Hits += f.Hits
		r.BytesLoaded += f.BytesLoaded
		r.BytesWritten += f.BytesWritten
		_, f.LoadTimes = timesOf(h.times.of[n])
		r.Levels = append(r.Levels, f)
	}
	r.MissRatio = 1 - float64(r.Hits)/float64(r.Accesses)
	r.PrefixHitRatio = float64(r.PrefixHits) / float64(r.Accesses)
	var farther float64
	r.LoadSeconds, r.LoadTimes = timesOf(h.times.all)
	_, r.PrefetchedTimes = timesOf(h.times.nearest)
	farther, _ = timesOf(h.times.farthest)
	r.SavedSeconds = r.PrefillSeconds - r.LoadSeconds
	r.FartherSeconds = farther - r.LoadSeconds
}

// open starts an instance of the policy for each level, and one that admits.
func (g *LevelGrid) open(ctx context.Context, w *Workload, p *Policy, a *Policy, write Write) (h *hierarchy,
	err error) {
	h = &hierarchy{w: w, times: newLevelTimes(g), write: write, levels: make([]simLevel, 0, len(g.Levels))}
	defer func() {
		if err != nil {
			h.close()
			h = nil
		}
	}()
	units := max(1, g.Options.ChunkUnits)
	var all uint64
	for n, l := range g.Levels {
		capacity, err := l.Capacity.Chunks(w, g.ChunkBytes)
		if err != nil {
			return h, fmt.Errorf("%w (level %d)", err, n)
		}
		capacity = min(capacity, len(w.keys))
		evicts := p
		if l.Policy != nil {
			evicts = l.Policy
		}
		bytes := uint64(capacity) * uint64(units) * abi.SizeUnit
		all += bytes
		speed := uint64(l.BytesPerSecond)
		h.place.facts = append(h.place.facts, abi.RootFacts{
			ID: uint32(n), Flags: abi.RootWritable, Capacity: bytes, ReadBps: speed, WriteBps: speed,
		})
		e, err := evicts.module.NewEvict(ctx, policy.EvictOptions{
			MaxSlots: uint32(capacity), Capacity: bytes, Seed: g.Options.Seed, Config: evicts.config,
		})
		if err != nil {
			return h, err
		}
		c := newCache(w, e, capacity, units)
		c.evicted = func(slot, id, number uint32, now uint64) error { return h.evictedFrom(n, slot, id, number, now) }
		h.levels = append(h.levels, simLevel{
			cache: c, grants: make([]uint32, capacity), figures: LevelFigures{Level: n, Capacity: capacity},
		})
	}
	if a.Role == abi.RolePlace {
		return h, h.openPlace(ctx, a, g.Options)
	}
	h.admit, err = a.module.NewAdmit(ctx, policy.AdmitOptions{
		Capacity: all, Seed: g.Options.Seed, Config: a.config, Observe: g.Options.Observe,
	})
	if err != nil {
		return h, err
	}
	return h, h.admit.Namespace(0, "model="+w.Name+"\n")
}

func (h *hierarchy) close() {
	for _, l := range h.levels {
		_ = l.e.Close() // it never fails
	}
	if h.admit != nil {
		_ = h.admit.Close()
	}
	if h.place.Place != nil {
		_ = h.place.Close()
	}
}
