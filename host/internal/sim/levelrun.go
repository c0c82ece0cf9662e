package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/moves"
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
	Hits         int   `json:"hits"`     // chunks that were loaded from it
	New          int   `json:"new"`
	Demotions    int   `json:"demotions"`
	Promotions   int   `json:"promotions"`
	Covered      int   `json:"covered"`     // evicted, while the next level had a copy
	Drops        int   `json:"drops"`       // evicted, and not demoted
	Shed         int   `json:"shed"`        // not stored, because the policy freed too little
	CopiesShed   int   `json:"copies_shed"` // copies to it that were not made, because others waited or there was no time
	BytesLoaded  int64 `json:"bytes_loaded"`
	BytesWritten int64 `json:"bytes_written"`
	LoadTimes    Times `json:"load_times"` // of requests that load from the level
}

// LevelGrid is every policy with every admission and way to write, on every workload.
type LevelGrid struct {
	Workloads  []*Workload
	Policies   []*Policy
	Admissions []*Policy
	Writes     []store.Write
	Levels     []Level
	ChunkBytes int64
	Workers    int   // copies at a time for each level but the nearest
	Bandwidth  int64 // bytes a second of all copies; 0 means no limit
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
func (g *LevelGrid) cell(row int) (p, a *Policy, w store.Write) {
	rest := row / len(g.Writes)
	return g.Policies[rest/len(g.Admissions)], g.Admissions[rest%len(g.Admissions)], g.Writes[row%len(g.Writes)]
}

func (g *LevelGrid) run(ctx context.Context, w *Workload, p *Policy, a *Policy, write store.Write) (LevelResult, error) {
	r := LevelResult{
		Trace: w.Name, Policy: p.Text, Admit: a.Text, Write: writes[write], ChunkBytes: g.ChunkBytes,
	}
	started := time.Now()
	h, err := g.open(ctx, w, p, a, write)
	if err != nil {
		return r, err
	}
	r.PrefixHits, r.PrefillSeconds, err = w.play(ctx, &g.Options, r.Policy, func(ids []uint32, number uint32) (int, error) {
		return h.request(ctx, ids, number)
	})
	r.count(h, g)
	if err := errors.Join(err, h.close()); err != nil {
		return r, err
	}
	r.Accesses, r.RecomputeSeconds = w.Accesses(), g.Options.Prefill.total(w)
	r.MissRatio = 1 - float64(r.Hits)/float64(r.Accesses)
	r.PrefixHitRatio = float64(r.PrefixHits) / float64(r.Accesses)
	r.Seconds = time.Since(started).Seconds()
	return r, nil
}

// count adds up the figures of the levels.
func (r *LevelResult) count(h *host, g *LevelGrid) {
	stats := h.store.Stats()
	r.Refused, r.Hits = h.refused, h.hits
	for n := range h.levels {
		f := h.levels[n].figures
		f.Shed = int(stats.Roots[n].Sheds)
		if n < len(stats.Levels) { // a policy that places has them in one
			to := &stats.Levels[n].Moves
			f.New += int(to[moves.Through].Done)
			f.Demotions, f.Promotions = int(to[moves.Demotion].Done), int(to[moves.Promotion].Done)
			f.CopiesShed = int(to[moves.Demotion].Shed + to[moves.Promotion].Shed + to[moves.Through].Shed)
		}
		f.BytesLoaded = int64(f.Hits) * g.ChunkBytes
		f.BytesWritten = int64(f.New+f.Demotions+f.Promotions) * g.ChunkBytes
		r.BytesLoaded += f.BytesLoaded
		r.BytesWritten += f.BytesWritten
		_, f.LoadTimes = timesOf(h.times.of[n])
		r.Levels = append(r.Levels, f)
	}
	var farther float64
	r.LoadSeconds, r.LoadTimes = timesOf(h.times.all)
	_, r.PrefetchedTimes = timesOf(h.times.nearest)
	farther, _ = timesOf(h.times.farthest)
	r.SavedSeconds = r.PrefillSeconds - r.LoadSeconds
	r.FartherSeconds = farther - r.LoadSeconds
}
