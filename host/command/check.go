package command

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/devices"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

func newCheck() *cobra.Command {
	var s settings
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check this machine: which route serves each GPU and root, and why",
		Long: `Tries what the configuration asks for: the roots (it writes a file with O_DIRECT in each, reads
it back and removes it), the GPUs, cuFile, the socket's directory and the resource limits. For roots in memory
it judges memory, huge pages and the limit of locked memory. With store.compression it measures the roots and the
codec for a moment (64 MiB in each root with 16 threads), and says what would be compressed there. It reports which
route serves each pair of GPU and root, why, and what would improve it. It changes nothing, works without a GPU,
and may run while a host does.`,
		Example: `  kvhost check --config /etc/kvhost.toml
  kvhost check --root /mnt/nvme0/kv=2TiB --json | jq .verdicts`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			loaded, err := s.load()
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return check(ctx, os.Stdout, &loaded.Config, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all facts and findings as JSON")
	s.addTo(cmd)
	return cmd
}

// check judges the machine.
func check(ctx context.Context, out io.Writer, cfg *config.Config, asJSON bool) error {
	memory := memoryBefore(cfg)
	cfg = cfg.WithMemory(memory)
	facts, err := doctor.Probe(ctx, cfg)
	if err != nil {
		return err
	}
	report := doctor.Judge(version, cfg, deviceBytes(cfg), facts)
	if needs, all, err := policyset.Needs(ctx, cfg); err != nil {
		report.Findings = append(report.Findings, doctor.Finding{Level: doctor.Problem, About: "policies", Says: err.Error()})
	} else {
		report.Needs(needs, all)
	}
	if memory > 0 {
		report.Findings = append(report.Findings, doctor.Finding{Level: doctor.Note, About: "memory", Says: "up to " +
			config.FormatSize(memory) + " are the nearest level, allocated as chunks need it", Fix: "store.memory sets the size, and 0 turns it off"})
	}
	if asJSON {
		err = writeJSON(out, report)
	} else {
		err = report.Write(out)
	}
	return errors.Join(err, report.Problems())
}

// deviceBytes is the GPU memory of the copy threads' windows, their codec, and the direct route's slots.
func deviceBytes(cfg *config.Config) int64 {
	if cfg.GDS.CUDA == config.CUDAOff {
		return 0
	}
	use := devices.GPUConfig(cfg)
	takes := use.DeviceBytes()
	if slices.ContainsFunc(cfg.Roots, cfg.TriesDirect) {
		takes += int64(cfg.GDS.BufferMiB) << 20
	}
	return takes
}
