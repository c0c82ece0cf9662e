package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/devices"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/staging"
)

func newCheck() *cobra.Command {
	var s settings
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check whether a host would start, which route serves each GPU and root, and why",
		Long: `Checks everything that a start needs, with the functions of the start: policies, roots and their locks,
certificate, token, headers of traces, limits, HTTP address, socket. An error that a start would refuse is a problem, with the
exit code of the start. While a host runs, its roots, socket and address count as in use.

It also tests the roots (it writes a file with O_DIRECT in each, reads it back and removes it), the GPUs, cuFile and the
resource limits. For roots in memory it checks free memory, huge pages and the limit of locked memory. It reports the route of
each pair of GPU and root, the reason, and possible improvements. If a host would start, but something configured cannot
work, the exit code is 9. It changes only the cache of compiled policies, and works without a GPU.`,
		Example: `  kvhost check --config /etc/kvhost.toml
  kvhost check --root /mnt/nvme0/kv=2TiB --json | jq .verdicts`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			loaded, err := s.load()
			if err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			return check(ctx, stdout, loaded, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all facts and findings as JSON")
	s.addTo(cmd)
	return cmd
}

func check(ctx context.Context, out io.Writer, loaded *config.Loaded, asJSON bool) error {
	memory := memoryBefore(&loaded.Config)
	total, _, _ := staging.MachineMemory()
	cfg := host.OnMachine(&loaded.Config, total).WithMemory(memory)
	facts, err := doctor.Probe(ctx, cfg)
	if err != nil {
		return err
	}
	report := doctor.Judge(version, cfg, deviceBytes(cfg), facts)
	start := host.Check(ctx, host.Config{Config: &loaded.Config, Version: version, Memory: memory})
	for _, w := range loaded.Warnings {
		start.Findings = append(start.Findings, doctor.Finding{Level: doctor.Warning, About: "start", Says: w})
	}
	report.Findings = append(start.Findings, report.Findings...)
	if memory > 0 {
		report.Findings = append(report.Findings, doctor.Finding{Level: doctor.Note, About: "memory", Says: "up to " +
			config.SizeText(memory) + " are the nearest level, allocated as chunks need it; store.memory sets the size, and 0 turns it off"})
	}
	for i := range report.Findings {
		report.Findings[i].Says = plainText(report.Findings[i].Says)
	}
	if asJSON {
		err = writeJSON(out, report)
	} else {
		err = report.Write(out)
	}
	if err == nil && start.Refused != nil {
		return fmt.Errorf("a host would not start: %w", start.Refused)
	}
	return errors.Join(err, report.Problems())
}

// deviceBytes returns the GPU memory for the copy threads' windows, their codec, and the slots of the direct route.
func deviceBytes(cfg *config.Config) int64 {
	if cfg.GDS.CUDA == config.CUDAOff {
		return 0
	}
	use := devices.GPUConfig(cfg)
	takes := use.DeviceBytes()
	if slices.ContainsFunc(cfg.Roots, cfg.TriesDirect) {
		takes += cfg.GDS.MaxDeviceMemory
	}
	return takes
}
