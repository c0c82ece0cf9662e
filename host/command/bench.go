package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/bench"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/devices"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/staging"
)

// benchOptions are the flags of bench.
type benchOptions struct {
	chunks, rounds int
	memory, pages  string
	dtype          string
	compression    []string
	clients        []int
	json           bool
}

func newBench() *cobra.Command {
	var s settings
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure stores and loads, and the limits of the machine, in one run",
		Long: `Stores and loads chunks in a temporary directory of each root, with the configured store and
engine. Checksums are made and verified, and every byte is compared. Pages are in a GPU's memory or, without
one, in host memory.

A client stores and loads through a host in another process, as an engine does: a job for each prompt of
64 chunks, and a lookup before each load.

Each figure stands next to its ceilings, which are measured in the same minutes. The first ceiling is the rate of copies
between pages and slots alone. The second is that of an equal number of threads that only write and rename files of
the same size, or read them. The first load of a round, and the threads, read files that were not read since they
were written. Passes alternate. Figures are medians over the rounds. The ratio is the rate of kvhost divided by the
smaller ceiling of the same round: median (first to third quartile). A root in memory has only the first ceiling.

--clients 1,2,4 measures one, two and four clients of one host at the same time. Each has its own GPU if pages are in a GPU's
memory. The clients begin and end each pass together, and so do the ceilings. Rates are the number of clients times the rate
of the slowest one.

Pages of heads and tokens are those of llama, stored as engines of several tensor-parallel sizes share them: a piece for each KV head. A
page has its heads outside its tokens, or its tokens outside its heads.

Pages have values of a normal distribution, as an engine's have, because what compression gains depends on them. With
--compression off,huffman,auto each setting has a host of its own and the same pages, in the same rounds:
"over off" compares it with off, and "stored" is the bytes of pages over what they take in the root.

The roots must exist, with free memory and disk for twice the bytes of all chunks, and once more for each further setting.`,
		Example: `  kvhost bench --root /mnt/nvme0/kv
  kvhost bench --root memory: --root /dev/shm
  kvhost bench --root memory: --clients 1,2,4,8
  kvhost bench --root /mnt/nvme0/kv --root /dev/shm --compression off,huffman,auto --pages llama`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			loaded, err := s.load()
			if err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			return runBench(ctx, &loaded.Config, &o)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.chunks, "chunks", 96, "chunks of a pass, of 32, 17 or 16 MiB")
	f.IntVar(&o.rounds, "rounds", 7, "rounds to measure, after one to warm up")
	f.StringVar(&o.memory, "memory", "auto", "memory of the pages: gpu, host, or auto (the first GPU if there is one)")
	f.StringVar(&o.pages, "pages", "all", "geometry of the pages: llama, mla, fp8, heads, tokens or all")
	f.StringSliceVar(&o.compression, "compression", nil,
		"settings of store.compression to compare: off, huffman, auto (default: as configured)")
	f.StringVar(&o.dtype, "dtype", "", "values of the pages: u8, bfloat16 or fp8 (default: those of the geometry)")
	f.IntSliceVar(&o.clients, "clients", []int{1}, "numbers of concurrent clients, each with its own GPU")
	f.BoolVar(&o.json, "json", false, "print the rows as JSON")
	s.addTo(cmd)
	return cmd
}

func runBench(ctx context.Context, cfg *config.Config, o *benchOptions) error {
	rows, err := measure(ctx, cfg, o)
	if err != nil {
		return err
	}
	if o.json {
		return writeJSON(stdout, rows)
	}
	return o.write(stdout, cfg, rows)
}

func writeJSON(w io.Writer, v any) error {
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	return out.Encode(v)
}

func (o *benchOptions) write(w io.Writer, cfg *config.Config, rows []bench.Row) error {
	fmt.Fprintf(w, "kvhost %s, %s, %d CPUs, %d threads, %d chunks, %d rounds. GB/s are medians.\n\n",
		version, runtime.Version(), runtime.NumCPU(), cfg.Engine.ThreadsPerGPU, o.chunks, o.rounds)
	return bench.Write(w, rows)
}

func measure(ctx context.Context, cfg *config.Config, o *benchOptions) (rows []bench.Row, err error) {
	if o.compression == nil {
		o.compression = []string{cfg.Store.Compression}
	}
	for _, setting := range o.compression {
		if !slices.Contains([]string{config.CompressionOff, config.CompressionHuffman, config.CompressionAuto}, setting) {
			return nil, usageError{fmt.Errorf("--compression %q: want off, huffman, auto, or some of them", setting)}
		}
	}
	if _, err := payload.Of(o.dtype); o.dtype != "" && err != nil {
		return nil, usageError{fmt.Errorf("--dtype: %w", err)}
	}
	for _, r := range cfg.Roots {
		switch r.Kind() {
		case config.Memory:
			continue
		case config.Bucket:
			return nil, usageError{fmt.Errorf("root %s is a bucket, whose speed kvhost check tells", r.Path)}
		}
		if _, err := os.Stat(r.Path); errors.Is(err, fs.ErrNotExist) {
			return nil, usageError{fmt.Errorf("root %s does not exist: create it first", r.Path)}
		}
	}
	if least := slices.Min(o.clients); least < 1 {
		return nil, usageError{fmt.Errorf("--clients %d: want at least 1", least)}
	}
	gpus, err := o.open(cfg)
	if err != nil {
		return nil, err
	}
	var direct *gds.DirectRoute
	if len(gpus) > 0 {
		for _, gpu := range gpus {
			defer gpu.Close()
		}
		if direct, err = devices.OpenDirect(cfg, gpus[0], bench.MaxFile); err != nil {
			fmt.Fprintf(os.Stderr, "kvhost: the direct route is not measured: %v\n", err)
		}
		if direct != nil {
			defer direct.Close()
		}
	}
	for _, shape := range bench.Shapes {
		if o.pages != "all" && o.pages != shape.Name {
			continue
		}
		shape.DType = cmp.Or(o.dtype, shape.DType)
		for _, root := range cfg.Roots {
			for _, clients := range o.clients {
				got, err := benchRoot(ctx, cfg, o, clients, gpus, direct, root, &shape)
				if err != nil {
					return nil, err
				}
				for _, r := range got {
					r.Pages = shape.Title + ", " + shape.DType
					rows = append(rows, r)
				}
			}
		}
	}
	if len(rows) == 0 {
		return nil, usageError{fmt.Errorf("--pages %q: want llama, mla, fp8, heads, tokens or all", o.pages)}
	}
	return rows, nil
}

// open opens the GPUs for the pages. Without GPUs the pages are in host memory.
func (o *benchOptions) open(cfg *config.Config) ([]*gds.GPU, error) {
	switch o.memory {
	case "host":
		return nil, nil
	case "auto", "gpu":
	default:
		return nil, usageError{fmt.Errorf("--memory %q: want gpu, host or auto", o.memory)}
	}
	cfg = cfg.Clone()
	for _, setting := range o.compression {
		if setting != config.CompressionOff {
			cfg.Store.Compression = setting // so that the GPU gets a codec
		}
	}
	gpus, err := devices.OpenFirst(cfg, slices.Max(o.clients))
	if err != nil && o.memory == "auto" && !errors.Is(err, devices.ErrTooFew) {
		return nil, nil
	}
	return gpus, err
}

// benchRoot measures every route to a root with a number of clients.
func benchRoot(ctx context.Context, cfg *config.Config, o *benchOptions, clients int, gpus []*gds.GPU, direct *gds.DirectRoute,
	root config.Root, shape *bench.Shape) (rows []bench.Row, err error) {
	e, dir := cfg.Engine, root.Path
	base := bench.Config{
		Clients: clients, FS: staging.OS(), Dir: dir, Geometry: shape.Geometry, Heads: shape.Heads, DType: shape.DType, Compression: o.compression,
		Chunks: o.chunks, Rounds: o.rounds, Threads: e.ThreadsPerGPU, SlotBytes: int(e.SlotBytes), Copiers: runtime.GOMAXPROCS(0),
		Root: root,
	}
	base.Root.Shared, base.Root.Route = false, config.RouteStaged
	more := int64(1 << 30) // room for probes, and for files that are removed late
	if root.Kind().TakesMemory() {
		more = 128 << 20 // which is touched, and never probed
	}
	base.Root.Capacity = int64(clients)*2*bench.MemoryBytes(o.chunks, &shape.Geometry) + more
	memory := "host memory"
	if len(gpus) > 0 {
		base.Copiers, memory, base.GPUs = e.ThreadsPerGPU, gpus[0].Name, gpus[:clients]
	}
	cached := base
	cached.FS = staging.Buffered(base.FS)
	cases := []struct {
		files string
		c     bench.Config
	}{{"page cache", cached}}
	if root.Kind().TakesMemory() {
		cases[0].files, cases[0].c = "page-locked memory", base
		cases[0].c.InMemory = true
	} else if cfg.Engine.DirectIO && bench.TakesDirectIO(dir) {
		cases = slices.Insert(cases, 0, cases[0])
		cases[0].files, cases[0].c = "direct I/O", base
		if direct != nil && clients == 1 {
			cases = append(cases, cases[0])
			cases[2].c.Direct, cases[2].c.Root.Route = direct, config.RouteDirect
		}
	}
	for _, k := range cases {
		k.c.Host = cfg.Clone()
		k.c.Host.Engine.DirectIO = k.c.FS == staging.OS()
		got, err := bench.Run(ctx, k.c)
		if err != nil && k.c.Direct != nil && ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "kvhost: %s: the direct route is not measured: %v\n", dir, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, r := range got {
			r.Memory, r.Files = memory, dir+", "+k.files
			rows = append(rows, r)
		}
	}
	return rows, nil
}
