package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// Options of a run.
type Options struct {
	ChunkUnits uint32 // size of a chunk in units of 4 KiB; 0 means 1
	Prefill    Prefill
	Seed       uint64
	// Progress, when set, is called every few thousand accesses with their number.
	Progress func(accesses int)
	// Observe, when set, gets the calls of the evict policy, with levels those of the admit or place policy.
	Observe policy.Observer
}

// Result is the outcome of one policy at one capacity on one workload.
type Result struct {
	Trace          string  `json:"trace"`
	Policy         string  `json:"policy"`
	Capacity       int     `json:"capacity"` // chunks
	Accesses       int     `json:"accesses"`
	Hits           int     `json:"hits"`
	MissRatio      float64 `json:"miss_ratio"`
	PrefixHitRatio float64 `json:"prefix_hit_ratio"` // what is contiguous from a request's start
	Evictions      int     `json:"evictions"`
	// Of the policy's loop: not reading the trace, nor numbering its chunks
	AccessesPerSecond float64 `json:"accesses_per_second"`
	RecomputeSeconds  float64 `json:"recompute_seconds"` // prefill of everything
	SavedSeconds      float64 `json:"recompute_seconds_saved"`
	SavedRatio        float64 `json:"recompute_saved_ratio"`
	Shed              int     `json:"shed"` // chunks not stored because the policy freed too little

	Seconds    float64 `json:"seconds"` // of the policy's loop
	PrefixHits int     `json:"prefix_hits"`
}

// finish fills in what follows from the counts.
func (r *Result) finish(w *Workload, o *Options, started time.Time) {
	r.Trace, r.Accesses = w.Name, len(w.ids)
	r.Seconds = time.Since(started).Seconds()
	r.MissRatio = 1 - float64(r.Hits)/float64(r.Accesses)
	r.PrefixHitRatio = float64(r.PrefixHits) / float64(r.Accesses)
	r.AccessesPerSecond = float64(r.Accesses) / r.Seconds
	r.RecomputeSeconds = o.Prefill.total(w)
	if r.RecomputeSeconds > 0 {
		r.SavedRatio = r.SavedSeconds / r.RecomputeSeconds
	}
}

// progressStep is the number of accesses between two checks of the context.
const progressStep = 1 << 16

// play passes the requests on in order, with their numbers from 1 on. It adds up what they find of their prefixes, and the
// seconds of prefill that this saves.
func (w *Workload) play(ctx context.Context, o *Options, name string, request func(ids []uint32, number uint32) (prefix int, err error)) (
	hits int, saved float64, err error) {
	costs := o.Prefill.upTo(w.longest)
	lo, done := 0, 0
	for i, end := range w.ends {
		prefix, err := request(w.ids[lo:end], uint32(i)+1)
		if err != nil {
			return 0, 0, fmt.Errorf("sim: %s: request %d: %w", name, i+1, err)
		}
		hits += prefix
		saved += costs[prefix]
		if lo = int(end); lo-done >= progressStep || i+1 == len(w.ends) {
			if o.Progress != nil {
				o.Progress(lo - done)
			}
			if done = lo; ctx.Err() != nil {
				return 0, 0, ctx.Err()
			}
		}
	}
	return hits, saved, nil
}

// Run simulates a root of capacity chunks under an eviction policy.
func (w *Workload) Run(ctx context.Context, m *policy.Module, config policy.Config, capacity int, o Options) (Result,
	error) {
	r := Result{Policy: m.Name(), Capacity: capacity}
	if capacity < 1 {
		return r, fmt.Errorf("%w: %d chunks", ErrCapacity, capacity)
	}
	capacity = min(capacity, len(w.keys))
	o.ChunkUnits = max(1, o.ChunkUnits)
	e, err := m.NewEvict(ctx, policy.EvictOptions{
		MaxSlots: uint32(capacity), Capacity: uint64(capacity) * uint64(o.ChunkUnits) * abi.SizeUnit,
		Seed: o.Seed, Config: config, Observe: o.Observe,
	})
	if err != nil {
		return r, err
	}
	defer e.Close()
	c := newCache(w, e, capacity, o.ChunkUnits)
	started := time.Now()
	if r.PrefixHits, r.SavedSeconds, err = w.play(ctx, &o, r.Policy, c.request); err != nil {
		return r, err
	}
	if err := e.Flush(); err != nil {
		return r, fmt.Errorf("sim: %s: %w", r.Policy, err)
	}
	r.Hits, r.Evictions, r.Shed = c.hits, c.evictions, c.shed
	r.finish(w, &o, started)
	return r, nil
}
