package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/trace"
)

func newTrace() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Generate and describe request traces",
		Long: `Generates and describes request traces: JSON lines, plain, gzip or zstd, a request in each line, such as

  {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}

The timestamp is in milliseconds, lengths are in tokens, and a hash id stands for a block of the prompt and all before it. Optional are
output_length, end_reason (stop, length, tool_call, abort), priority, and return_ms until the prefix is expected again.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("%s: want gen or info", cmd.CommandPath())}
		},
	}
	cmd.AddCommand(newTraceGen(), newTraceInfo())
	return cmd
}

func newTraceGen() *cobra.Command {
	m := trace.DefaultMix()
	var out string
	gap := time.Duration(m.GapMillis) * time.Millisecond
	cmd := &cobra.Command{
		Use:   "gen",
		Short: "Generate a trace from a seed: conversations, agents with sub-agents, one-shot prompts",
		Long: `Generates a trace from a seed. Sessions share system prompts, conversations and agents extend
their prefix turn by turn, and agents start sub-agents. The same flags give the same bytes on every machine; the
defaults give examples/traces/mixed.jsonl.zst.`,
		Example: `  kvhost trace gen --out examples/traces/mixed.jsonl.zst
  kvhost trace gen --seed 7 --requests 50000 --chat 0 --one-shot 0 --out agents.jsonl.gz
  kvhost trace gen --requests 10`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			m.GapMillis = int(gap.Milliseconds())
			return traceGen(m, out)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVarP(&out, "out", "o", "-", "file, compressed when it ends in .gz or .zst; - is standard output")
	f.Uint64Var(&m.Seed, "seed", m.Seed, "seed")
	f.IntVar(&m.Requests, "requests", m.Requests, "requests")
	f.IntVar(&m.Chat, "chat", m.Chat, "weight of conversations among new sessions")
	f.IntVar(&m.Agent, "agent", m.Agent, "weight of agents among new sessions")
	f.IntVar(&m.OneShot, "one-shot", m.OneShot, "weight of one-shot prompts among new sessions")
	f.IntVar(&m.Prompts, "prompts", m.Prompts, "shared system prompts of each kind")
	f.DurationVar(&gap, "gap", gap, "mean time between two new sessions")
	f.IntVar(&m.BlockTokens, "block-tokens", m.BlockTokens, "tokens per hash id")
	return cmd
}

func traceGen(m trace.Mix, out string) (err error) {
	file := os.Stdout
	if out != "-" {
		if file, err = os.Create(out); err != nil {
			return err
		}
		defer func() {
			if e := file.Close(); err == nil {
				err = e
			}
		}()
	}
	w, err := trace.NewWriter(file, out)
	if err != nil {
		return err
	}
	if err := trace.Generate(m, w.Write); err != nil {
		return err
	}
	return w.Close()
}

func newTraceInfo() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "info FILE...",
		Short: "Describe traces: sizes, reuse, and the hit ratio of an infinite cache",
		Example: "  kvhost trace info examples/traces/mixed.jsonl.zst\n" +
			"  kvhost trace info --json conversation.jsonl.gz",
		Args: wantArgs(1, math.MaxInt, "a trace file"),
		RunE: func(_ *cobra.Command, args []string) error {
			for _, path := range args {
				if err := traceInfo(path, asJSON); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per trace")
	return cmd
}

func traceInfo(path string, asJSON bool) error {
	r, err := trace.Open(path)
	if err != nil {
		return err
	}
	defer r.Close()
	c := trace.NewCollector()
	var req trace.Request
	var failure error
	for failure == nil {
		if failure = r.Next(&req); failure == nil {
			c.Add(&req)
		}
	}
	s := c.Stats()
	switch {
	case failure != io.EOF: // what is redirected has whole traces only
		fmt.Fprintf(os.Stderr, "kvhost: the part of %s that can be read:\n", path)
		return errors.Join(infoTable(os.Stderr, path, &s), failure)
	case asJSON:
		return json.NewEncoder(os.Stdout).Encode(infoOf(path, &s))
	}
	return infoTable(os.Stdout, path, &s)
}

// info is the JSON form of a trace's statistics.
type info struct {
	Trace            string  `json:"trace"`
	Requests         int64   `json:"requests"`
	Accesses         int64   `json:"accesses"`
	Unique           int64   `json:"unique"`
	OneTimeShare     float64 `json:"one_time_share"`
	InfiniteHitRatio float64 `json:"infinite_hit_ratio"`
	PrefixHitRatio   float64 `json:"infinite_prefix_hit_ratio"`
	OtherParents     int64   `json:"other_parents"`
	SpanSeconds      float64 `json:"span_seconds"`
	InputTokens      int64   `json:"input_tokens"`
	OutputTokens     int64   `json:"output_tokens"`
	BlocksMean       float64 `json:"blocks_per_request_mean"`
	BlocksP50        uint64  `json:"blocks_per_request_p50"`
	BlocksP90        uint64  `json:"blocks_per_request_p90"`
	BlocksP99        uint64  `json:"blocks_per_request_p99"`
	BlocksMax        uint64  `json:"blocks_per_request_max"`
	ReuseP50         float64 `json:"reuse_gap_seconds_p50"`
	ReuseP90         float64 `json:"reuse_gap_seconds_p90"`
	ReuseP99         float64 `json:"reuse_gap_seconds_p99"`
}

func infoOf(path string, s *trace.Stats) info {
	gap := func(q float64) float64 { return float64(s.ReuseMillis.Quantile(q)) / 1000 }
	return info{
		Trace: path, Requests: s.Requests, Accesses: s.Accesses, Unique: s.Unique, OneTimeShare: s.OneTimeShare(),
		InfiniteHitRatio: s.HitRatio(), PrefixHitRatio: s.PrefixHitRatio(), OtherParents: s.OtherParents,
		SpanSeconds: float64(s.SpanMillis) / 1000, InputTokens: s.InputTokens, OutputTokens: s.OutputTokens,
		BlocksMean: s.Blocks.Mean(), BlocksP50: s.Blocks.Quantile(0.5), BlocksP90: s.Blocks.Quantile(0.9),
		BlocksP99: s.Blocks.Quantile(0.99), BlocksMax: s.Blocks.Max(), ReuseP50: gap(0.5), ReuseP90: gap(0.9),
		ReuseP99: gap(0.99),
	}
}

func infoTable(out io.Writer, path string, s *trace.Stats) error {
	i := infoOf(path, s)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "trace\t%s\n", i.Trace)
	fmt.Fprintf(w, "requests\t%d in %.0f s\n", i.Requests, i.SpanSeconds)
	fmt.Fprintf(w, "tokens\t%d in, %d out\n", i.InputTokens, i.OutputTokens)
	fmt.Fprintf(w, "block accesses\t%d\n", i.Accesses)
	fmt.Fprintf(w, "unique blocks\t%d (%.1f %% used once)\n", i.Unique, 100*i.OneTimeShare)
	fmt.Fprintf(w, "blocks per request\tmean %.1f, p50 %d, p90 %d, p99 %d, max %d\n", i.BlocksMean, i.BlocksP50,
		i.BlocksP90, i.BlocksP99, i.BlocksMax)
	fmt.Fprintf(w, "reuse gap\tp50 %.0f s, p90 %.0f s, p99 %.0f s\n", i.ReuseP50, i.ReuseP90, i.ReuseP99)
	fmt.Fprintf(w, "infinite cache\thit ratio %.4f, as prefixes %.4f\n", i.InfiniteHitRatio, i.PrefixHitRatio)
	if i.OtherParents > 0 {
		fmt.Fprintf(w, "not chained\t%d accesses with another parent than before\n", i.OtherParents)
	}
	return w.Flush()
}
