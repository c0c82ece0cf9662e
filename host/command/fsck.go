package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

type fsckFlags struct {
	settings  settings // configuration of buckets
	options   fsck.Options
	readLimit string
	asJSON    bool
	quiet     bool
}

func newFsck() *cobra.Command {
	f := fsckFlags{}
	cmd := &cobra.Command{
		Use:   "fsck ROOT...",
		Short: "Verify every piece of a root by its checksums; report and repair",
		Long: `Reads every piece of each root and verifies its header, size, checksum table, and each extent of
up to 64 KiB. It also reports pieces that no host would find, abandoned temporaries, and damage in the store's
own files.

It is safe while a host runs and stores and evicts chunks. A repair moves damaged files to the root's quarantine.
A running host counts their bytes there, and their chunks are misses. A repair removes temporaries if no host
uses the root. It never writes to a piece.

For a root in a bucket (s3://bucket/prefix) the server comes from its [[root]] in the configuration, or from the defaults of
AWS. A check reads each object, or only its head with --quick. A repair needs the bucket's lock, so no host may hold or
share it.

Exit codes:
  0   no problems, or all were repaired
  8   problems remain: see the report
  11  the check did not finish
  12  wrong usage`,
		Example: `  kvhost fsck /mnt/nvme0/kv
  kvhost fsck --repair --read-limit 500MiB /mnt/nvme0/kv /mnt/nvme1/kv
  kvhost fsck --quick --json /mnt/nvme0/kv`,
		Args: wantArgs(math.MaxInt, "the path of a root"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			return f.run(ctx, cmd.OutOrStdout(), args)
		},
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.BoolVar(&f.options.Quick, "quick", false, "check headers and sizes only; read no payload")
	fl.BoolVar(&f.options.Repair, "repair", false, "move damaged files to the quarantine, remove abandoned temporaries")
	fl.IntVar(&f.options.Workers, "workers", 2*runtime.GOMAXPROCS(0), "files at a time")
	fl.StringVar(&f.readLimit, "read-limit", "0", "most bytes read per second, 0 for no limit")
	fl.DurationVar(&f.options.TempAge, "temp-age", time.Hour,
		"age at which a temporary counts as abandoned, if hosts share the root or without --repair")
	fl.StringVarP(&f.settings.file, "config", "c", "", "TOML file with the roots in buckets (default: $"+config.EnvFile+", else none)")
	fl.BoolVar(&f.asJSON, "json", false, "print a JSON array with a report per root instead of text")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "no progress bar")
	return cmd
}

func (f *fsckFlags) run(ctx context.Context, out io.Writer, roots []string) error {
	limit, err := config.ParseSize(f.readLimit)
	if err != nil {
		return usageError{fmt.Errorf("fsck: --read-limit: %w", err)}
	}
	f.options.ReadLimit = limit
	var errs, problems []error
	reports := []*fsck.Report{}
	for _, root := range roots {
		r, err := f.check(ctx, root)
		if err != nil {
			errs = append(errs, err)
		}
		if r == nil {
			continue
		}
		problems = append(problems, r.Err())
		reports = append(reports, r)
		if !f.asJSON {
			if err := r.WriteText(out); err != nil {
				return err
			}
		}
	}
	if f.asJSON {
		errs = append(errs, writeJSON(out, reports))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return errors.Join(problems...)
}

func (f *fsckFlags) check(ctx context.Context, root string) (*fsck.Report, error) {
	o := f.options
	if strings.HasPrefix(root, s3fs.Scheme) {
		bucket, err := f.bucket(root)
		if err != nil {
			return nil, err
		}
		defer bucket.Close()
		o.FS, o.Alone = bucket, true
	}
	b := newProgress("files of "+root, f.quiet)
	if b.out != nil {
		n, err := fsck.Files(ctx, root, o.FS)
		if err != nil {
			return nil, err
		}
		b.Begin(n)
		o.Progress = b.OfFiles()
	}
	defer b.End()
	return fsck.Check(ctx, root, o)
}

// bucket returns the file system of a root in a bucket.
func (f *fsckFlags) bucket(root string) (*s3fs.FS, error) {
	loaded, err := f.settings.load()
	if err != nil {
		return nil, err
	}
	at := config.Root{Path: root}
	bucket, prefix := s3fs.Split(root)
	for _, r := range loaded.Config.Roots {
		if b, p := s3fs.Split(r.Path); strings.HasPrefix(r.Path, s3fs.Scheme) && b == bucket && p == prefix {
			at = r
		}
	}
	c := at.Bucket()
	c.Target, c.Holder = pieceformat.Target, "kvhost fsck"
	return s3fs.Open(c)
}
