package command

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// allGrants are the grants for commands that judge modules without serving requests.
var allGrants = []string{abi.GrantClock, abi.GrantMetrics, abi.GrantRandom}

func newPolicyInspect() *cobra.Command {
	var o policy.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inspect FILE...",
		Short: "Describe modules without running them: manifest, roles, imports, grants, limits, digest",
		Example: `  kvhost policy inspect lru
  kvhost policy inspect --json mine.wasm
  kvhost policy inspect --public-key RWQ... vendor.wasm`,
		Args: wantFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Grants = allGrants
			refused := 0
			for _, path := range args {
				i, err := policy.Inspect(cmd.Context(), path, o)
				if err != nil {
					return err
				}
				if i.Refused != nil {
					refused++
				}
				if asJSON {
					err = json.NewEncoder(cmd.OutOrStdout()).Encode(inspectionOf(i))
				} else {
					err = inspectTable(cmd.OutOrStdout(), i)
				}
				if err != nil {
					return err
				}
			}
			if refused > 0 {
				return fmt.Errorf("%w: a host would refuse %d of %d", policy.ErrBadModule, refused, len(args))
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per module")
	cmd.Flags().StringVar(&o.PublicKey, "public-key", "", "public key of the module's signature, which is then verified too")
	return cmd
}

// inspection is the JSON form of the output.
type inspection struct {
	*policy.Inspection
	Roles   []string `json:"roles"`
	Grants  []string `json:"grants"`
	Refused string   `json:"refused,omitempty"`
}

func inspectionOf(i *policy.Inspection) inspection {
	out := inspection{Inspection: i, Roles: []string{}, Grants: slices.Concat([]string{}, i.Grants())}
	for _, r := range i.Roles {
		out.Roles = append(out.Roles, r.String())
	}
	if i.Refused != nil {
		out.Refused = i.Refused.Error()
	}
	return out
}

func inspectTable(out io.Writer, i *policy.Inspection) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "module\t%s\n", i.Name)
	if i.Path != "" {
		fmt.Fprintf(w, "file\t%s\n", i.Path)
	}
	fmt.Fprintf(w, "sha256\t%s\n", i.Digest)
	fmt.Fprintf(w, "size\t%d bytes\n", i.Bytes)
	if m := i.Manifest; m == nil {
		fmt.Fprintf(w, "manifest\tnone: it gets no grants, and its settings are not checked\n")
	} else {
		fmt.Fprintf(w, "version\t%s\n", m.Version)
		fmt.Fprintf(w, "description\t%s\n", m.Description)
		for _, key := range slices.Sorted(maps.Keys(m.Config)) {
			o := m.Config[key]
			fmt.Fprintf(w, "setting\t%s (%s, default %q): %s\n", key, o.Type, o.Default, o.Help)
		}
		if len(m.Counters) > 0 {
			fmt.Fprintf(w, "counters\t%s\n", strings.Join(m.Counters, ", "))
		}
	}
	fmt.Fprintf(w, "roles\t%s\n", roleList(i.Roles))
	fmt.Fprintf(w, "grants\t%s\n", cmp.Or(strings.Join(i.Grants(), ", "), "none"))
	byModule := map[string][]string{}
	for _, im := range i.Imports {
		name := im.Name
		if !im.Known {
			name += " (unknown)"
		}
		byModule[im.Module] = append(byModule[im.Module], name)
	}
	for _, module := range slices.Sorted(maps.Keys(byModule)) {
		fmt.Fprintf(w, "imports\t%s: %s\n", module, strings.Join(byModule[module], ", "))
	}
	if i.Manifest != nil && i.Manifest.VictimsAhead > 0 {
		fmt.Fprintf(w, "victims ahead\t%d\n", i.Manifest.VictimsAhead)
	}
	if i.StateFormat != "" {
		fmt.Fprintf(w, "state\t%s\n", i.StateFormat)
	}
	fmt.Fprintf(w, "memory\t%.1f MiB at start, at most %.1f MiB\n", float64(i.MemoryPages)/16, float64(i.MostPages)/16)
	fmt.Fprintf(w, "fuel\t%d per call and %d per record, at most %d, within %v; %d events per call\n", i.Fuel.Call,
		i.Fuel.Record, i.MostFuel, i.Fuel.Time, i.Batch)
	for _, c := range i.Counts {
		if 2*c.Got > c.Most && c.Most > 0 { // counts below half of their limit are left out
			fmt.Fprintf(w, "limit\t%s: %d of %d\n", c.What, c.Got, c.Most)
		}
	}
	if i.Refused != nil {
		fmt.Fprintf(w, "refused\t%v\n", i.Refused)
	}
	return w.Flush()
}
