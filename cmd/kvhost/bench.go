package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/host/transfer/pathbench"
	"github.com/kvhost/kvhost/staging"
)

// shapes are the geometries that can be measured.
var shapes = []struct {
	name, title string
	geometry    chunk.Geometry
}{
	{"llama", "Llama-3.1-8B, 32 x 64 KiB pages", chunk.Uniform(16, 32, 1, 64<<10)},
	{"mla", "MLA, 61 x 18,432 B pages", chunk.Uniform(16, 61, 1, 18432)},
}

// benchOptions are the flags of bench.
type benchOptions struct {
	chunks, rounds int
	memory, pages  string
	json           bool
}

func newBench() *cobra.Command {
	var s settings
	var o benchOptions
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure stores and loads beside the machine's own ceilings, in one run",
		Long: `bench stores and loads chunks in a directory of its own in each root, through store and engine as configured, with
checksums made and verified and every byte compared, from and to a GPU's memory or, without one, memory of this machine.
Beside each figure stand its ceilings from the same minutes: the copy between pages and slots alone, and the same number of
plain threads that write and rename, or read, files of the same size. Passes alternate; figures are medians over the
rounds, and the ratio is ours over the smaller ceiling of its round: median (first to third quartile).

It wants a root that exists, and twice the bytes of all chunks as memory and as disk for each round.`,
		Example: `  kvhost bench --root /mnt/nvme0/kv
  kvhost bench --root /dev/shm --memory host --chunks 16 --pages mla`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			loaded, err := s.load()
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return bench(ctx, &loaded.Config, &o)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.chunks, "chunks", 96, "chunks in a pass, of 32 or 17 MiB")
	f.IntVar(&o.rounds, "rounds", 7, "rounds that count; one more comes before them")
	f.StringVar(&o.memory, "memory", "auto", "where pages are: gpu, host, or auto: the first GPU if there is one")
	f.StringVar(&o.pages, "pages", "all", "their geometry: llama, mla or all")
	f.BoolVar(&o.json, "json", false, "print the rows as JSON")
	s.addTo(cmd)
	return cmd
}

func bench(ctx context.Context, cfg *config.Config, o *benchOptions) error {
	gpu, err := o.open(cfg)
	if err != nil {
		return err
	}
	if gpu != nil {
		defer gpu.Close()
	}
	var rows []pathbench.Row
	for _, shape := range shapes {
		if o.pages != "all" && o.pages != shape.name {
			continue
		}
		for _, root := range cfg.Roots {
			for _, files := range []string{"direct I/O", "page cache"} {
				fs := staging.OS()
				if files == "page cache" {
					fs = staging.Buffered(fs)
				} else if !cfg.Engine.DirectIO {
					continue
				}
				e := cfg.Engine
				c := pathbench.Config{
					GPU: gpu, FS: fs, Dir: root.Path, Geometry: shape.geometry, Chunks: o.chunks, Rounds: o.rounds,
					Engine: transfer.Config{
						Threads: e.ThreadsPerGPU, SlotBytes: int(e.SlotBytes), MaxStaging: e.MaxStagingMemory, ReadRatio: e.ReadPreferringRatio,
					},
					Copiers: runtime.GOMAXPROCS(0),
				}
				memory := "host memory"
				if gpu != nil {
					c.Copiers, memory = cfg.GDS.CopyThreads, gpu.Name
				}
				got, err := pathbench.Run(ctx, c)
				if err != nil {
					return err
				}
				for _, r := range got {
					r.Pages, r.Memory, r.Files = shape.title, memory, root.Path+", "+files
					rows = append(rows, r)
				}
			}
		}
	}
	if len(rows) == 0 {
		return usageError{fmt.Errorf("--pages %q: want llama, mla or all", o.pages)}
	}
	if o.json {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		return out.Encode(rows)
	}
	fmt.Printf("kvhost %s, %s, %d CPUs, %d threads, verification on, %d chunks, %d rounds. GB/s are medians.\n\n", version, runtime.Version(),
		runtime.NumCPU(), cfg.Engine.ThreadsPerGPU, o.chunks, o.rounds)
	return pathbench.Write(os.Stdout, rows)
}

// open takes the GPU whose memory is measured, if any.
func (o *benchOptions) open(cfg *config.Config) (*gds.GPU, error) {
	switch o.memory {
	case "host":
		return nil, nil
	case "auto", "gpu":
	default:
		return nil, usageError{fmt.Errorf("--memory %q: want gpu, host or auto", o.memory)}
	}
	gpu, err := firstGPU(cfg)
	if err != nil && o.memory == "auto" {
		return nil, nil
	}
	return gpu, err
}

func firstGPU(cfg *config.Config) (*gds.GPU, error) {
	if cfg.GDS.CUDA == config.CUDAOff {
		return nil, fmt.Errorf("%w: gds.cuda is off", gds.ErrNoDriver)
	}
	driver, err := gds.Open(nil)
	if err != nil {
		return nil, err
	}
	devices, err := driver.Devices()
	if err != nil {
		return nil, err
	}
	if len(devices) == 0 {
		return nil, gds.ErrNoGPU
	}
	return driver.OpenGPU(devices[0].UUID, gds.Config{Threads: cfg.GDS.CopyThreads, Blocks: cfg.GDS.CopyBlocks})
}
