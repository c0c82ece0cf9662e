package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/replay"
)

// replayFlags are the flags of replay, and those of the configuration.
type replayFlags struct {
	settings
	options    replay.Options
	chunkBytes string
	embedded   bool
	store      string
	withRoots  bool
	capacity   string
	json       bool
}

func newReplay() *cobra.Command {
	var r replayFlags
	cmd := &cobra.Command{
		Use:   "replay --trace FILE",
		Short: "Replay a request trace against a host, and compare every byte that comes back",
		Long: `Replays a request trace against a running host (--socket), or against one that it starts
(--embedded). For each request it looks up the prefix, loads the hits, compares every byte, stores the rest and
waits for the publication. It prints a table or a JSON object, and fails when wrong bytes were served (exit code
7) or the host failed to store or load (exit code 11).

A trace is JSON lines {timestamp, input_length, output_length, hash_ids}, plain, gzip or zstd. Each hash id is
one chunk. An embedded host uses the configuration, except for its socket, HTTP listener and, without --with-roots,
roots.`,
		Example: `  kvhost replay --embedded --trace examples/traces/mixed.jsonl.zst --policy lru.wasm --capacity 2000
  kvhost replay --embedded --trace t.jsonl.gz --capacity 100GiB --store /mnt/nvme0/replay --sessions 8 --ranks 2
  kvhost replay --socket /run/kvhost.sock --trace t.jsonl.gz --limit 1000 --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.StringVarP(&r.options.Trace, "trace", "t", "", "trace to replay (required)")
	f.BoolVar(&r.embedded, "embedded", false, "start a host for the replay: real socket, real files, policies in wasm")
	f.StringVar(&r.store, "store", "", "embedded: directory for the chunks, kept afterwards (default: a temporary one)")
	f.BoolVar(&r.withRoots, "with-roots", false,
		"embedded: use the configuration's roots, for example to replay through levels; chunks stay there")
	f.StringVar(&r.capacity, "capacity", "", "embedded: capacity in chunks, or in bytes with a unit (default 10GiB)")
	f.IntVar(&r.options.Sessions, "sessions", 1,
		"concurrent sessions; the requests of a conversation stay in one, in order")
	f.IntVar(&r.options.Shape.Ranks, "ranks", 1,
		"ranks of each session's engine; each has its own piece of every chunk")
	f.StringVar(&r.chunkBytes, "chunk-bytes", "64KiB", "size of a chunk in one rank: a multiple of 16KiB, or less than 16KiB")
	f.StringVar(&r.options.Shape.DType, "dtype", payload.U8, "content of pages: u8 (any bytes), or bfloat16 or fp8, which can be compressed")
	f.IntVar(&r.options.Limit, "limit", 0, "requests to replay (default: all)")
	f.Float64Var(&r.options.Speed, "speed", 0, "1: at the trace's times; 2: twice as fast; 0: without waiting")
	f.BoolVar(&r.json, "json", false, "print one JSON object instead of the table")
	r.addTo(cmd)
	return cmd
}

func (r *replayFlags) run(ctx context.Context) error {
	loaded, err := r.parse()
	if err != nil {
		return err
	}
	ctx, stop := untilSignal(ctx)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills the process
	r.options.Socket = loaded.Config.Socket
	if r.embedded {
		r.options.Start = func(ctx context.Context) (string, func() error, error) {
			return r.embed(ctx, &loaded.Config)
		}
	}
	return r.play(ctx)
}

func (r *replayFlags) play(ctx context.Context) error {
	bar := newProgress("requests", false)
	r.options.Begin, r.options.Step = func(requests int) { bar.Begin(int64(requests)) }, countRequests(bar)
	report, err := replay.Run(ctx, r.options)
	bar.End()
	if err != nil && ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if report == nil {
		return err
	}
	if r.json {
		err = errors.Join(err, json.NewEncoder(stdout).Encode(report))
	} else {
		err = errors.Join(err, report.Table(stdout))
	}
	return errors.Join(err, report.Err())
}

// parse parses the flags of replay and loads the configuration.
func (r *replayFlags) parse() (*config.Loaded, error) {
	if r.options.Trace == "" {
		return nil, usageError{errors.New("replay: want --trace FILE")}
	}
	if !r.embedded && (r.store != "" || r.capacity != "" || r.withRoots) {
		return nil, usageError{errors.New("replay: --store, --capacity and --with-roots are for --embedded; a running host has " +
			"its own")}
	}
	if r.embedded && slices.ContainsFunc(r.given, func(s config.Setting) bool { return s.Key == "socket" }) {
		return nil, usageError{errors.New("replay: --socket names a running host, and --embedded starts another one")}
	}
	if r.withRoots && (r.store != "" || r.capacity != "") {
		return nil, usageError{errors.New("replay: --with-roots does not go with --store or --capacity: the configuration " +
			"has both")}
	}
	n, err := config.ParseSize(r.chunkBytes)
	if err != nil {
		return nil, fmt.Errorf("--chunk-bytes: %w", err)
	}
	if r.options.Shape.ChunkBytes = n; n == 0 {
		return nil, usageError{errors.New("--chunk-bytes: 0")}
	}
	if _, err := r.options.Shape.Namespace(); err != nil {
		return nil, err
	}
	return r.load()
}

// capacityBytes returns --capacity in bytes. entry returns the size of one chunk with all its ranks.
func (r *replayFlags) capacityBytes(entry func() (int64, error)) (int64, error) {
	chunks, err := strconv.ParseInt(r.capacity, 10, 64)
	if err != nil {
		n, err := config.ParseSize(r.capacity)
		if err != nil {
			return 0, fmt.Errorf("--capacity: %w", err)
		}
		return n, nil
	}
	if chunks < 1 {
		return 0, usageError{fmt.Errorf("--capacity: %d chunks", chunks)}
	}
	bytes, err := entry()
	if err != nil {
		return 0, err
	}
	if chunks > (1<<62)/bytes {
		return 0, usageError{fmt.Errorf("--capacity: %d chunks", chunks)}
	}
	return chunks * bytes, nil
}

// countRequests returns a function that advances a progress line after each request of a replay.
func countRequests(p *progress) func(replay.Request) {
	var accesses, hits, bytes atomic.Int64
	return func(r replay.Request) {
		ratio := float64(hits.Add(int64(r.Hits))) / float64(max(1, accesses.Add(int64(r.Accesses))))
		p.Step(1, fmt.Sprintf("hit ratio %.4f, %.2f GB", ratio, float64(bytes.Add(r.Loaded+r.Stored))/1e9))
	}
}
