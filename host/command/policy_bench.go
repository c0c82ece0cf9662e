package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/policy/plugintest"
)

func newPolicyBench() *cobra.Command {
	var o plugintest.Options
	var settings []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "bench FILE...",
		Short: "Measure the cost of modules beside the built-in policies",
		Long: `Measures a module in each of its roles: an event in full batches, an eviction (one ask and the
REMOVE and INSERT that follow), a candidate, a path and its inverse, a plan. It alternates with the native
built-in policy of the role; the fastest of nine rounds counts. allocs are the host's; fuel is about one unit
per instruction.`,
		Example: "  kvhost policy bench mine.wasm\n  kvhost policy bench --json lru prefix",
		Args:    wantFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return withModules(cmd, settings, &o, func(ctx context.Context) error {
				return policyBench(ctx, cmd.OutOrStdout(), args, o, asJSON)
			})
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringArrayVar(&settings, "set", nil, "a setting, as key=value; repeatable")
	f.Uint32Var(&o.Slots, "slots", 1<<16, "entries of the full root on which eviction is measured")
	f.BoolVar(&asJSON, "json", false, "print one JSON object per module")
	return cmd
}

func policyBench(ctx context.Context, out io.Writer, paths []string, o plugintest.Options, asJSON bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "module\tper\tns\tallocs\tfuel\tbuilt-in ns\tallocs\ttimes\t\n")
	for _, path := range paths {
		measures, err := plugintest.Bench(ctx, path, o)
		if err != nil {
			return err
		}
		if asJSON {
			err := json.NewEncoder(out).Encode(struct {
				Module   string               `json:"module"`
				Measures []plugintest.Measure `json:"measures"`
			}{path, measures})
			if err != nil {
				return err
			}
			continue
		}
		for _, m := range measures {
			fmt.Fprintf(w, "%s\t%s\t%.1f\t%.2f\t%.0f\t%.1f\t%.2f\t%.1f\t\n", path, m.What, m.Module.Nanos,
				m.Module.Allocs, m.Module.Fuel,
				m.Builtin.Nanos, m.Builtin.Allocs, m.Module.Nanos/m.Builtin.Nanos)
		}
	}
	if asJSON {
		return nil
	}
	return w.Flush()
}
