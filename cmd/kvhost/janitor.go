package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/regular"
	"github.com/kvhost/kvhost/host/screen"
	"github.com/kvhost/kvhost/host/store/fsck"
	"github.com/kvhost/kvhost/host/store/janitor"
)

// maxNamespaceText bounds the file of a namespace's text.
const maxNamespaceText = 1 << 20

type janitorFlags struct {
	options    janitor.Options
	capacity   string
	policy     string
	place      string
	policyDir  string
	namespaces []string
	once       bool
	interval   time.Duration
	asJSON     bool
	quiet      bool
}

func newJanitor() *cobra.Command {
	f := janitorFlags{}
	cmd := &cobra.Command{
		Use:   "janitor DIR --capacity N",
		Short: "Keep a directory that another program fills within a capacity",
		Long: `Scans a directory and, when its files take more than the capacity, removes what the evict policy
chooses: whole entries, by the times when their files were last read or written. It works on directories that
llm-d's or vLLM's file-system connector writes: the place policy llmd.wasm reads their file names, with the
config.json that the connector keeps there.

It only removes files that the place policy identifies and, with --temp-age, old temporaries (*.tmp). All files
count towards the capacity. It refuses the root of a kvhost, which bounds its own roots.

Exit codes:
  0  the directory is within its capacity
  1  it is not, or could not be scanned
  2  wrong usage
  3  a host uses the directory
  5  a policy was refused`,
		Example: `  kvhost janitor /mnt/pvc/kv-cache --capacity 8TiB --place llmd.wasm --dry-run
  kvhost janitor /mnt/pvc/kv-cache --capacity 8TiB --place llmd.wasm --policy s3fifo.wasm --interval 1m --temp-age 24h`,
		Args: wantArgs(1, 1, "one directory"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return f.run(ctx, cmd.OutOrStdout(), args[0])
		},
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVar(&f.capacity, "capacity", "", "most bytes on disk, such as 8TiB")
	fl.Float64Var(&f.options.Low, "low", 0.9, "share of the capacity to evict down to")
	fl.StringVar(&f.policy, "policy", "",
		"evict policy: a .wasm file or the name of an embedded one (default the built-in lru)")
	fl.StringVar(&f.place, "place", "", "place policy that reads the file names (default the built-in one)")
	fl.StringVar(&f.policyDir, "policy-dir", "",
		"directory that is searched for policies by name before the embedded ones")
	fl.StringArrayVar(&f.namespaces, "namespace", nil,
		"file with the text of a namespace that the directory lacks; repeatable")
	fl.DurationVar(&f.options.TempAge, "temp-age", 0, "remove *.tmp files that are older (default never)")
	fl.BoolVar(&f.options.DryRun, "dry-run", false, "remove nothing; report what would be removed")
	fl.BoolVar(&f.once, "once", false, "run one round, as without --interval")
	fl.DurationVar(&f.interval, "interval", 0, "start a round this often, until SIGINT or SIGTERM")
	fl.BoolVar(&f.asJSON, "json", false, "print a JSON object per round instead of text")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress bar")
	return cmd
}

func (f *janitorFlags) run(ctx context.Context, out io.Writer, dir string) error {
	var err error
	if f.options.Capacity, err = config.ParseSize(f.capacity); err != nil {
		return usageError{fmt.Errorf("janitor: --capacity: %w", err)}
	}
	if f.once && f.interval > 0 {
		return usageError{errors.New("janitor: --once and --interval exclude each other")}
	}
	for _, name := range f.namespaces {
		text, err := regular.ReadFile(ctx, name, maxNamespaceText)
		if err != nil {
			return usageError{fmt.Errorf("janitor: --namespace: %w", err)}
		}
		f.options.Namespaces = append(f.options.Namespaces, string(text))
	}
	if f.policy != "" {
		m, done, err := openRole(ctx, f.policy, f.policyDir, abi.RoleEvict)
		if err != nil {
			return err
		}
		defer done()
		f.options.Evict = m
	}
	if f.place != "" {
		m, done, err := openRole(ctx, f.place, f.policyDir, abi.RolePlace)
		if err != nil {
			return err
		}
		defer done()
		f.options.Place = m
	}
	f.options.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	b := screen.NewProgress("files of "+dir, f.quiet)
	step := b.OfFiles()
	f.options.Progress = func(files, bytes int64) { step(files, bytes) }
	j, err := janitor.New(ctx, dir, f.options)
	if err != nil {
		return err
	}
	defer j.Close()
	for {
		next := time.After(f.interval)
		step = b.OfFiles()
		if b.Shown() {
			n, err := fsck.Files(ctx, dir, nil)
			if err != nil {
				return err
			}
			b.Begin(n)
		}
		r, err := j.Round(ctx)
		b.End()
		if f.interval > 0 && ctx.Err() != nil {
			return nil // a signal
		}
		if perr := f.print(out, r); perr != nil {
			return perr
		}
		if f.interval == 0 {
			return err
		}
		if err != nil {
			f.options.Log.Error("round failed", "error", err)
		}
		select {
		case <-next:
		case <-ctx.Done():
			return nil
		}
	}
}

func (f *janitorFlags) print(out io.Writer, r *janitor.Round) error {
	if f.asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	what := map[bool]string{false: "removed", true: "would remove"}[r.DryRun]
	size := func(n int64) string { return screen.Size(uint64(n)) }
	_, err := fmt.Fprintf(out,
		"%s: %d files of entries, %s; %d other files, %s; %s %d files, %s; %s of %s used; %d spared, %d not removable; %.1f s\n",
		r.Dir, r.Files.Files, size(r.Files.Bytes), r.Unknown.Files, size(r.Unknown.Bytes), what, r.Removed.Files,
		size(r.Removed.Bytes), size(r.Used), size(r.Capacity), r.Spared, r.Failed, r.Took.Seconds())
	return err
}
