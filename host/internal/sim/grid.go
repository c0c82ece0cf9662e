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

// runAll makes n runs, one per core at a time. The first error ends them.
func runAll[R any](ctx context.Context, n int, run func(ctx context.Context, i int) (R, error)) ([]R, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	results := make([]R, n)
	for i := range results {
		group.Go(func() (err error) {
			results[i], err = run(ctx, i)
			return err
		})
	}
	return results, group.Wait()
}

// Run does all runs.
func (g *Grid) Run(ctx context.Context) (*Outcome, error) {
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
	per := len(g.Policies) * len(g.Capacities)
	results, err := runAll(ctx, len(g.Workloads)*per, func(ctx context.Context, i int) (Result, error) {
		w, p, k := i/per, i%per/len(g.Capacities), i%len(g.Capacities)
		return g.Policies[p].run(ctx, g.Workloads[w], chunks[w][k], g.Options)
	})
	return &Outcome{results, g}, err
}
