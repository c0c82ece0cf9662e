package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/plugintest"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
)

func newPolicyList() *cobra.Command {
	r := running{looks: true}
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the policies of a running host, and the would-be hit ratios of its shadows",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := r.status(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return printPart(cmd.OutOrStdout(), st, "policies", "policy_memory", "policy_memory_limit")
			}
			return listPolicies(cmd.OutOrStdout(), st)
		},
	}
	r.addTo(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: the policies, as kvhost status --json has them")
	return cmd
}

func listPolicies(w io.Writer, st *proto.StatusResponse) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t,
		"POLICY\tROLE\tSTATE\tMODULE\tVERSION\tSHA-256\tSINCE\tCALLS\tFAULTS\tFUEL/RECORD\tMEMORY\tHIT RATIO\tWHERE")
	for _, p := range st.Policies {
		state := proto.Word(p.State)
		ratio, where := "", p.Root
		switch {
		case p.Trial != nil:
			ratio = fmt.Sprintf("%s, live %s", share(p.Trial.Hits, p.Trial.Keys), share(p.Trial.LiveHits, p.Trial.Keys))
			where = fmt.Sprintf("an imaginary %s", config.FormatSize(int64(p.Trial.Capacity)))
			if p.Trial.Dropped > 0 {
				where += fmt.Sprintf(", %d steps dropped", p.Trial.Dropped)
			}
		case p.Role == proto.PolicyRole_POLICY_ROLE_EVICT:
			ratio = share(st.Counters["lookup_hits"], st.Counters["lookup_keys"])
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\n", p.Name, proto.Word(p.Role), state, p.Module, p.Version,
			short(p.Digest), p.Since.AsTime().Format(time.DateTime), p.Calls, p.Faults, perRecord(p), memoryOf(p), ratio, where)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if st.PolicyMemoryLimit > 0 {
		fmt.Fprintf(w, "memory of all: %s, at most %s (policy_memory)\n", config.SizeText(st.PolicyMemory),
			config.SizeText(st.PolicyMemoryLimit))
	}
	for _, p := range st.Policies {
		if p.Reason != "" {
			fmt.Fprintf(w, "%s: %s\n", p.Name, p.Reason)
		}
	}
	return nil
}

func share(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.4f", float64(part)/float64(whole))
}

func perRecord(p *proto.PolicyStatus) string {
	if p.Fuel == 0 || p.Records == 0 {
		return "-"
	}
	return fmt.Sprint(p.Fuel / p.Records)
}

// memoryOf is the memory of a policy's instances; a native one has none of its own.
func memoryOf(p *proto.PolicyStatus) string {
	if p.Memory == 0 {
		return "-"
	}
	return config.SizeText(p.Memory)
}

// short is enough of a digest for people to tell modules apart.
func short(digest string) string { return cmp.Or(digest[:min(len(digest), 12)], "built in") }

func newPolicySwap() *cobra.Command {
	var r running
	q := &proto.SwapPolicyRequest{}
	var unchecked bool
	cmd := &cobra.Command{
		Use:   "swap POLICY [MODULE]",
		Short: "Replace a policy of a running host, under load",
		Long: `Replaces the module of a policy, in all its roles, without interrupting sessions. The new module
is judged first as kvhost policy check does with 65,536 slots, which takes seconds; then the host opens it with its own limits
and tells it what is resident. Where it has findings, is refused or fails, the old one stays, and the exit code is 5. POLICY is a
name from kvhost policy list. Without MODULE the policy restarts from its file, unjudged, with the settings given.

The change lasts until the host restarts or reloads its configuration (SIGHUP). To keep it, write it to the
configuration.`,
		Example: `  kvhost policy swap lru ./mine.wasm --sha256 4f0c...
  kvhost policy swap prefix --set window=20`,
		Args: wantArgs(1, 2, "the name of a policy, and a module"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Name = args[0]
			if len(args) == 2 {
				q.Module = modulePath(args[1])
			}
			if q.Module != "" && !unchecked {
				st, err := r.status(cmd.Context())
				if err != nil {
					return err // without a host nothing is worth seconds
				}
				if names := policyNames(st); !slices.Contains(names, q.Name) {
					return fmt.Errorf("%w: no policy %q is active%s", policyset.ErrPolicy, q.Name, config.Suggest(q.Name, names))
				}
				if err := judge(cmd, q); err != nil {
					return err
				}
			}
			a, err := ask(cmd.Context(), &r, proto.NewAdminServiceClient, proto.AdminServiceClient.SwapPolicy, q)
			if err != nil {
				return err
			}
			printTaken(cmd.OutOrStdout(), args[0], a.Swap)
			return nil
		},
	}
	r.addTo(cmd)
	cmd.Flags().BoolVar(&unchecked, "unchecked", false, "do not judge the module first; the host tests less of it")
	cmd.Flags().StringVar(&q.Sha256, "sha256", "", "SHA-256 that the module must have, in hexadecimal")
	cmd.Flags().StringToStringVar(&q.Config, "set", nil, "a setting of the policy, as key=value; repeatable")
	return cmd
}

func policyNames(st *proto.StatusResponse) (names []string) {
	for _, p := range st.Policies {
		names = append(names, p.Name)
	}
	return names
}

// judge refuses a module in which a short policy check finds something. One that only the host knows by its name is left to it.
func judge(cmd *cobra.Command, q *proto.SwapPolicyRequest) error {
	var settings []string
	for key, value := range q.Config {
		settings = append(settings, key+"="+value)
	}
	o := plugintest.Options{Slots: 1 << 16}
	return withModules(cmd, settings, &o, func(ctx context.Context) error {
		r, err := plugintest.Check(ctx, q.Module, o)
		switch {
		case errors.Is(err, policy.ErrNotFound):
			return nil
		case err != nil:
			return err
		case len(r.Findings) > 0:
			next := "`kvhost policy check` has the rest"
			if len(r.Calls) > 0 { // it starts, so that a host takes it
				next += ", --unchecked leaves it to the host's own tests"
			}
			return fmt.Errorf("%w: %s: %v; %s", errFindings, q.Module, &r.Findings[0], next)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: checked, no findings\n", q.Module)
		return nil
	})
}

// modulePath makes a path absolute: the host has another working directory. A name stays a name.
func modulePath(module string) string {
	if _, err := os.Stat(module); err == nil || filepath.Base(module) != module {
		if path, err := filepath.Abs(module); err == nil {
			return path
		}
	}
	return module
}

func printTaken(w io.Writer, name string, a *proto.Swap) {
	fmt.Fprintf(w, "%s is %s, sha256 %s\n", name, a.Module, a.Digest)
	for _, t := range a.Taken {
		if t.Role == proto.PolicyRole_POLICY_ROLE_EVICT {
			fmt.Fprintf(w, "  evict %s: replaced %s, handover by %s, %d entries, %.3f s\n", t.Root, short(t.From),
				proto.Word(t.Handover), t.Entries, t.Time.AsDuration().Seconds())
		} else {
			fmt.Fprintf(w, "  %s: replaced %s\n", proto.Word(t.Role), short(t.From))
		}
	}
}

func newPolicyPromote() *cobra.Command {
	var r running
	q := &proto.PromotePolicyRequest{}
	cmd := &cobra.Command{
		Use:   "promote SHADOW",
		Short: "Make a shadow of a running host its evict policy",
		Long: `Starts a new instance of the shadow's module, replays every entry to it in order of last touch,
and lets it evict. The shadow ends. The change lasts until the host restarts or reloads its configuration (SIGHUP).
To keep it, write it to the configuration.`,
		Args: wantArgs(1, 1, "the name of one shadow"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Name = args[0]
			a, err := ask(cmd.Context(), &r, proto.NewAdminServiceClient, proto.AdminServiceClient.PromotePolicy, q)
			if err != nil {
				return err
			}
			printTaken(cmd.OutOrStdout(), args[0], a.Swap)
			return nil
		},
	}
	r.addTo(cmd)
	cmd.Flags().StringVar(&q.Root, "root", "", "the root that it evicts from (default: all)")
	return cmd
}
