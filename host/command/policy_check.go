package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/plugintest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

// errFindings means that a check has findings.
var errFindings = errors.New("policy: the check has findings")

func newPolicyCheck() *cobra.Command {
	var o plugintest.Options
	var settings []string
	var asJSON, verbose bool
	cmd := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check modules against the contract: one line per finding",
		Long: `Calls the module as a host would, with simulated entries, requests and namespaces, and checks
every answer against abi/SPEC.md: victims that are pinned or gone, paths that collide, layouts that miss bytes,
answers that differ between instances, state that does not survive a handover, traps on bad input, and calls that
need more fuel than a host gives. FILE is a .wasm file or the name of an embedded policy.

Each finding is a line: the file, what, where, and what to do. The exit code is then 5.`,
		Example: "  kvhost policy check mine.wasm\n" +
			"  kvhost policy check --set depth_cost=16 --slots 10000000 mine.wasm",
		Args: wantFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return withModules(cmd, settings, &o, func(ctx context.Context) error {
				return policyCheck(ctx, cmd.OutOrStdout(), args, o, asJSON, verbose)
			})
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringArrayVar(&settings, "set", nil, "a setting, as key=value; repeatable")
	f.StringSliceVar(&o.Grants, "grant", nil, "grants that the operator would allow (default all)")
	f.Uint32Var(&o.Slots, "slots", 1<<20, "slots of the largest instance")
	f.Uint64Var(&o.Seed, "seed", 0, "seed of the random requests")
	f.BoolVar(&asJSON, "json", false, "print one JSON object per file")
	f.BoolVar(&o.Profile, "profile", false, "also print the fuel of the module's functions; calls take longer")
	f.BoolVarP(&verbose, "verbose", "v", false, "also print the most expensive call of each export")
	return cmd
}

// withModules runs a command on modules until a signal, with their settings and the cache of compiled modules.
func withModules(cmd *cobra.Command, settings []string, o *plugintest.Options,
	do func(context.Context) error) (err error) {
	if o.Config, err = parseSettings(settings); err != nil {
		return err
	}
	ctx, stop := untilSignal(cmd.Context())
	defer stop()
	cache, err := policyset.OpenCache(config.CacheAuto, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	o.Cache = cache
	return do(ctx)
}

func parseSettings(list []string) (policy.Config, error) {
	if len(list) == 0 {
		return nil, nil
	}
	c := policy.Config{}
	for _, s := range list {
		key, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usageError{fmt.Errorf("--set %s: want key=value", s)}
		}
		c[key] = value
	}
	return c, nil
}

func policyCheck(ctx context.Context, out io.Writer, paths []string, o plugintest.Options, asJSON, verbose bool) error {
	findings := 0
	for _, path := range paths {
		r, err := plugintest.Check(ctx, path, o)
		if err != nil {
			return err
		}
		findings += len(r.Findings)
		if asJSON {
			if err := json.NewEncoder(out).Encode(r); err != nil {
				return err
			}
			continue
		}
		for i := range r.Findings {
			fmt.Fprintf(out, "%s: %v\n", path, &r.Findings[i])
		}
		if len(r.Findings) == 0 {
			fmt.Fprintf(out, "%s: ok: %s; %.1f MiB of memory with %d slots; %s\n", path, roleList(r.Roles),
				float64(r.Memory)/(1<<20), r.Slots, mostExpensive(r.Calls))
		}
		writeProfile(out, r.Profile)
		if verbose {
			for _, u := range r.Calls {
				fmt.Fprintf(out, "  %-12s most expensive call: %d of %d fuel (%.0f %%), %d records\n", u.Export,
					u.Used, u.Allowed, 100*u.Share(), u.Records)
			}
		}
	}
	if findings > 0 {
		return fmt.Errorf("%w: %d", errFindings, findings)
	}
	return nil
}

// writeProfile prints the functions that used the most fuel, for each export.
func writeProfile(out io.Writer, functions []sandbox.FunctionFuel) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	for len(functions) > 0 {
		n, sum := 0, uint64(0)
		for ; n < len(functions) && functions[n].Export == functions[0].Export; n++ {
			sum += functions[n].Fuel
		}
		fmt.Fprintf(w, "\n%s: %d fuel\nown\twith calls\tcalls\tfuel\t\n", functions[0].Export, sum)
		for _, f := range functions[:min(n, 12)] {
			percent := 100 / float64(max(1, sum))
			fmt.Fprintf(w, "%.1f %%\t%.1f %%\t%d\t%d\t  %s\n", percent*float64(f.Fuel), percent*float64(f.Whole), f.Calls, f.Fuel, f.Function)
		}
		functions = functions[n:]
	}
	w.Flush()
}

func roleList[T fmt.Stringer](roles []T) string {
	var names []string
	for _, r := range roles {
		names = append(names, r.String())
	}
	return strings.Join(names, ", ")
}

func mostExpensive(calls []plugintest.Usage) string {
	var most plugintest.Usage
	for _, u := range calls {
		if u.Share() >= most.Share() {
			most = u
		}
	}
	return fmt.Sprintf("most expensive call: %s, %.0f %% of its fuel", most.Export, 100*most.Share())
}
