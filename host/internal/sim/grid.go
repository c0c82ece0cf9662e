package sim

import (
	"context"
	"runtime"

	"golang.org/x/sync/errgroup"
)

// Grid is every policy at every capacity on every workload.
type Grid struct {
	Workloads  []*Workload
	Policies   []*Policy
	Capacities []Capacity
	ChunkBytes int64 // what capacities in bytes are divided by
	Parallel   int   // runs at a time; 0 means one per core
	Options    Options
}

// Accesses is the number of accesses of all runs together.
func (g *Grid) Accesses() (n int64) {
	for _, w := range g.Workloads {
		n += int64(w.Accesses())
	}
	return n * int64(len(g.Policies)) * int64(len(g.Capacities))
}

// Outcome is a grid's results.
type Outcome struct {
	Results []Result // by workload, then policy, then capacity
	grid    *Grid
}

// At returns one result.
func (o *Outcome) At(workload, pol, capacity int) *Result {
	g := o.grid
	return &o.Results[(workload*len(g.Policies)+pol)*len(g.Capacities)+capacity]
}

// inParallel is a group for so many runs at a time; 0 means one per core.
func inParallel(ctx context.Context, runs int) (*errgroup.Group, context.Context) {
	if runs <= 0 {
		runs = runtime.GOMAXPROCS(0)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runs)
	return group, ctx
}

// Run does all runs, one per core at a time. The first error ends them.
func (g *Grid) Run(ctx context.Context) (*Outcome, error) {
	o := &Outcome{grid: g, Results: make([]Result, len(g.Workloads)*len(g.Policies)*len(g.Capacities))}
	chunks := make([][]int, len(g.Workloads))
	for i, w := range g.Workloads {
		for _, c := range g.Capacities {
			n, err := c.Chunks(w, g.ChunkBytes)
			if err != nil {
				return nil, err
			}
			chunks[i] = append(chunks[i], n)
		}
	}
	group, ctx := inParallel(ctx, g.Parallel)
	for i, w := range g.Workloads {
		for j, p := range g.Policies {
			for k := range g.Capacities {
				group.Go(func() error {
					r, err := p.run(ctx, w, chunks[i][k], g.Options)
					*o.At(i, j, k) = r
					return err
				})
			}
		}
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return o, nil
}
