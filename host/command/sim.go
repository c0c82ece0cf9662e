package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/sim"
)

type simFlags struct {
	traces     []string
	policies   []string
	policyDir  string
	capacities []string
	asJSON     bool
	asCSV      bool
	quiet      bool
	chunkBytes string
	ratio      float64
	prefill    sim.Prefill
	seed       uint64
	levels     levelFlags
	calls      string
}

func newSim() *cobra.Command {
	f := simFlags{prefill: sim.DefaultPrefill()}
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Simulate eviction policies on request traces",
		Long: `Runs eviction policies, the same modules that a host runs, over traces without touching storage:
one policy and capacity per core at a time. A hit is a chunk that is resident when it is used, in the order of
the trace.

A policy is a .wasm file or the name of an embedded one, with settings after a colon (prefix.wasm).
There are two baselines: belady, the offline optimum, evicts the chunk whose next use is furthest away; infinite
never evicts.

A capacity is a share of the trace's unique chunks, rounded down (10%), a number of chunks (5000), or a size
(64GiB), which is divided by --chunk-bytes.

--level simulates a host with levels instead: the host's own store, with levels that keep sizes only. The nearest level is
memory. The simulation plays one request at a time, at its time in the trace or when the request before it has ended.
Loads, stores and copies between levels take time according to --cost and --chunk-bytes, the size of a chunk. The saved
time is the time that prefill would have taken, less the time of the loads.

A trace has one JSON object in each line, for one request:

  {"timestamp": 27482, "input_length": 6955, "hash_ids": [46, 47, 48, 2353]}

The timestamp is in milliseconds, the length in tokens. A hash id stands for a block of the prompt and all blocks before it. A request
may also have output_length, end_reason (stop, length, tool_call, abort), priority, and return_ms, the milliseconds until the
prefix is expected again.

--calls writes each call of the module to a file, with its answer and its fuel, and the lines that the module logs. Keys are hash ids of
the trace. It takes one policy at one capacity. With --level it writes the calls of --admit, which may then be a place policy: it
chooses among levels that are equally near.

accesses_per_second counts the policy's loop only. The figure for the whole run includes reading the trace,
numbering its chunks and compiling the modules.`,
		Example: `  kvhost sim --trace examples/traces/mixed.jsonl.zst --policy lru.wasm --policy s3fifo.wasm --policy belady
  kvhost sim --trace a.jsonl.gz,b.jsonl.zst --policy-dir bin/policies --policy arc.wasm --capacity 1%,5%,20%
  kvhost sim --trace a.jsonl.gz --policy mine.wasm --policy prefix.wasm --json
  kvhost sim --trace a.jsonl.gz --policy mine.wasm --capacity 1% --calls /dev/stderr 2>&1 >/dev/null | jq .Victims
  kvhost sim --trace a.jsonl.gz --level 0=1%,1=10%,2=100% --cost 0=50,1=5,2=1 --policy lru.wasm --write back,through`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			if err := f.check(cmd.Flags().Changed); err != nil {
				return usageError{err}
			}
			return f.run(ctx)
		},
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringSliceVar(&f.traces, "trace", nil,
		"trace files, separated by commas; repeatable. JSON lines, plain, gzip or zstd")
	fl.StringArrayVar(&f.policies, "policy", nil, "policy to simulate; repeatable (default lru.wasm and belady)")
	fl.StringVar(&f.policyDir, "policy-dir", "",
		"directory that is searched for policies by name before the embedded ones")
	fl.StringSliceVar(&f.capacities, "capacity", []string{"1%", "5%", "10%", "20%", "50%"},
		"capacities, separated by commas")
	fl.BoolVar(&f.asJSON, "json", false, "print a JSON array instead of tables")
	fl.BoolVar(&f.asCSV, "csv", false, "print a line of values for each result instead of tables, with the fields of --json")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress bar")
	fl.StringVar(&f.chunkBytes, "chunk-bytes", "",
		"size of a chunk, required for policies and capacities in bytes (default 4KiB, with levels 64MiB)")
	fl.Float64Var(&f.ratio, "compression-ratio", 1, "factor by which compression raises the number of chunks that fit a capacity")
	fl.IntVar(&f.prefill.ChunkTokens, "chunk-tokens", f.prefill.ChunkTokens,
		"tokens of a chunk, for the cost of recomputing it")
	fl.Float64Var(&f.prefill.TokensPerSecond, "prefill-rate", f.prefill.TokensPerSecond,
		"tokens computed per second at the start of a context; 0 for no cost figures")
	fl.Float64Var(&f.prefill.DoubleAt, "prefill-double-at", f.prefill.DoubleAt,
		"tokens of context at which a token costs twice as much; 0 for never")
	fl.Uint64Var(&f.seed, "seed", 1, "seed of randomised policies")
	fl.StringVar(&f.calls, "calls", "", "file for the calls of the module, a JSON object each")
	f.levels.define(fl)
	return cmd
}

func (f *simFlags) run(ctx context.Context) (err error) {
	started := time.Now()
	if len(f.policies) == 0 {
		if f.policies = []string{"lru.wasm"}; !f.levels.on() {
			f.policies = append(f.policies, sim.Belady)
		}
	}
	g := &sim.Grid{Options: sim.Options{Prefill: f.prefill, Seed: f.seed}}
	if err := f.sizes(g); err != nil {
		return usageError{err}
	}
	cache, err := policyset.OpenCache(config.CacheAuto, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	opt := policy.Options{Dir: f.policyDir, Cache: cache}
	if f.calls != "" {
		w, err := os.Create(f.calls)
		if err != nil {
			return err
		}
		b := bufio.NewWriter(w)
		defer func() { err = errors.Join(err, b.Flush(), w.Close()) }()
		g.Options.Observe, opt.Log = callsTo(b), slog.New(slog.NewJSONHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for _, text := range f.policies {
		p, err := openSimPolicy(ctx, text, opt)
		if err != nil {
			return err
		}
		defer p.Close(context.WithoutCancel(ctx))
		g.Policies = append(g.Policies, p)
	}
	if err := f.load(ctx, g); err != nil {
		return err
	}
	if f.levels.on() {
		return f.simulateLevels(ctx, &sim.LevelGrid{
			Workloads: g.Workloads, Policies: g.Policies, ChunkBytes: g.ChunkBytes, Options: g.Options, Workers: config.Default().Move.Workers,
		}, opt)
	}
	loaded := time.Since(started)
	err = simulate(f, g.Accesses(), &g.Options, func() (*sim.Outcome, error) { return g.Run(ctx) }, func(o *sim.Outcome) any { return o.Results })
	if err != nil || f.asJSON || f.asCSV {
		return err
	}
	total := time.Since(started)
	fmt.Printf("whole run: %.1f s, of which %.1f s opening policies and reading traces; %.1f M accesses/s overall\n",
		total.Seconds(), loaded.Seconds(), float64(g.Accesses())/1e6/total.Seconds())
	return nil
}

// simulate runs a simulation and prints the results.
func simulate[O interface{ WriteTable(io.Writer) error }](f *simFlags, accesses int64, opt *sim.Options, run func() (O, error),
	results func(O) any) error {
	bar := newProgress("accesses", f.quiet)
	bar.Begin(accesses)
	opt.Progress = func(accesses int) { bar.Step(int64(accesses), "") }
	o, err := run()
	bar.End()
	switch {
	case errors.Is(err, sim.ErrCapacity), errors.Is(err, sim.ErrPolicy):
		return usageError{err}
	case err != nil:
		return err
	case f.asJSON:
		return writeJSON(stdout, results(o))
	case f.asCSV:
		return sim.WriteCSV(stdout, results(o))
	}
	return o.WriteTable(stdout)
}

func openSimPolicy(ctx context.Context, text string, opt policy.Options) (*sim.Policy, error) {
	p, err := sim.OpenPolicy(ctx, text, opt)
	if errors.Is(err, sim.ErrPolicy) {
		return nil, usageError{err}
	}
	return p, err
}

// sizes parses the capacities and the chunk's size.
func (f *simFlags) sizes(g *sim.Grid) error {
	for _, text := range f.capacities {
		c, err := sim.ParseCapacity(text)
		if err == nil {
			c, err = c.Compressed(f.ratio)
		}
		if err != nil {
			return err
		}
		if c.InBytes() && f.chunkBytes == "" {
			return fmt.Errorf("sim: --capacity %s: want --chunk-bytes, the size of a chunk of the trace", text)
		}
		g.Capacities = append(g.Capacities, c)
	}
	bytes, units, err := sim.ParseChunkBytes(f.chunkBytesText())
	if err != nil {
		return err
	}
	g.ChunkBytes, g.Options.ChunkUnits = bytes, units
	return nil
}

func (f *simFlags) load(ctx context.Context, g *sim.Grid) error {
	if len(f.traces) == 0 {
		return usageError{errors.New("sim: want a trace: --trace FILE")}
	}
	for _, path := range f.traces {
		w, err := sim.Load(ctx, path)
		if err != nil {
			return err
		}
		g.Workloads = append(g.Workloads, w)
	}
	return nil
}
