package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/sim"
)

// levelFlags are the flags of a simulation with levels.
type levelFlags struct {
	capacities []string
	costs      []string
	policies   []string
	admissions []string
	writes     []string
	bandwidth  string
}

func (f *levelFlags) define(fl *pflag.FlagSet) {
	fl.StringSliceVar(&f.capacities, "level", nil, "simulate levels: their capacities, as 0=1%,1=10%; 0 is the nearest")
	fl.StringSliceVar(&f.costs, "cost", nil, "speed of each level in GB/s, and optionally its latency, as 0=50,1=5:30ms")
	fl.StringVar(&f.bandwidth, "move-bandwidth", "", "most bytes per second that are copied between levels (default that of move.bandwidth)")
	fl.StringArrayVar(&f.policies, "level-policy", nil,
		"policy of one level, as 1=x.wasm, instead of those of --policy; repeatable")
	fl.StringArrayVar(&f.admissions, "admit", []string{sim.AdmitDefault},
		"rule for stores and for moves between levels: default (the host's own), all, or an admit policy; repeatable")
	fl.StringSliceVar(&f.writes, "write", []string{"back"},
		"time of the copy to the next level: back (at eviction), hits (also at a hit), through (at once), or several, separated by commas")
}

// on reports whether levels are simulated.
func (f *levelFlags) on() bool { return len(f.capacities) > 0 }

// check returns an error for flags that contradict each other. changed reports whether a flag was given.
func (f *simFlags) check(changed func(string) bool) error {
	if f.asJSON && f.asCSV {
		return errors.New("sim: want --json or --csv")
	}
	runs := len(f.policies) * len(f.traces)
	if f.levels.on() {
		runs *= len(f.levels.admissions) * len(f.levels.writes)
	} else {
		runs *= len(f.capacities)
	}
	if f.calls != "" && runs != 1 {
		return errors.New("sim: --calls wants one trace, one --policy and one --capacity or --level with one --admit and one --write")
	}
	if f.levels.on() {
		for _, name := range []string{"capacity", "compression-ratio"} {
			if changed(name) {
				return fmt.Errorf("sim: --%s does not go with --level", name)
			}
		}
		return nil
	}
	for _, name := range []string{"cost", "move-bandwidth", "level-policy", "admit", "write"} {
		if changed(name) {
			return fmt.Errorf("sim: --%s wants --level", name)
		}
	}
	return nil
}

// simulateLevels runs the grid with levels and prints the results.
func (f *simFlags) simulateLevels(ctx context.Context, g *sim.LevelGrid, opt policy.Options) (err error) {
	l := &f.levels
	if g.Levels, err = sim.ParseLevels(l.capacities, l.costs); err != nil {
		return usageError{err}
	}
	if g.Bandwidth = config.Default().Move.Bandwidth; l.bandwidth != "" {
		if g.Bandwidth, err = config.ParseSize(l.bandwidth); err != nil {
			return usageError{fmt.Errorf("sim: --move-bandwidth: %w", err)}
		}
	}
	for _, text := range l.writes {
		w, err := sim.ParseWrite(text)
		if err != nil {
			return usageError{err}
		}
		g.Writes = append(g.Writes, w)
	}
	for _, text := range l.policies {
		n, name, err := sim.OfLevel(text, "1=lru.wasm")
		if err == nil && n >= len(g.Levels) {
			err = fmt.Errorf("%w: --level-policy %s: there is no level %d", sim.ErrLevel, text, n)
		}
		if err != nil {
			return usageError{err}
		}
		p, err := openSimPolicy(ctx, name, opt)
		if err != nil {
			return err
		}
		defer p.Close(context.WithoutCancel(ctx))
		g.Levels[n].Policy = p
	}
	if g.Admissions, err = f.openAdmissions(ctx, opt); err != nil {
		return err
	}
	defer closeAll(ctx, g.Admissions)
	return simulate(f, g.Accesses(), &g.Options, func() (*sim.LevelOutcome, error) { return g.Run(ctx) },
		func(o *sim.LevelOutcome) any { return o.Results })
}

func (f *simFlags) openAdmissions(ctx context.Context, opt policy.Options) (list []*sim.Policy, err error) {
	roles := []abi.Role{abi.RoleAdmit}
	if f.calls != "" {
		roles = append(roles, abi.RolePlace)
	}
	for _, text := range f.levels.admissions {
		a, err := sim.OpenAdmission(ctx, text, opt, roles...)
		if errors.Is(err, sim.ErrPolicy) {
			err = usageError{err}
		}
		if err != nil {
			closeAll(ctx, list)
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

func closeAll(ctx context.Context, list []*sim.Policy) {
	for _, p := range list {
		_ = p.Close(context.WithoutCancel(ctx)) // an error has no consequence
	}
}

// chunkBytesText returns the chunk's size. With levels it must be a real one, because the time of loads depends on it.
func (f *simFlags) chunkBytesText() string {
	if f.levels.on() {
		return cmp.Or(f.chunkBytes, "64MiB")
	}
	return cmp.Or(f.chunkBytes, "4KiB")
}
