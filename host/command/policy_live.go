package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
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
			tables := observe.Tables(st, st)
			i := slices.IndexFunc(tables, func(t observe.Table) bool { return t.Name == "policies" })
			var b strings.Builder
			writeTable(&b, &tables[i], len(tables[i].Rows))
			fmt.Fprintf(&b, "memory of all: %s, at most %s (policy_memory)\n", config.SizeText(st.PolicyMemory), config.SizeText(st.PolicyMemoryLimit))
			_, err = io.WriteString(cmd.OutOrStdout(), b.String())
			return err
		},
	}
	r.addTo(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the policies as JSON, as in kvhost status --json")
	return cmd
}

func newPolicySwap() *cobra.Command {
	var r running
	q := &proto.SwapPolicyRequest{}
	var unchecked bool
	cmd := &cobra.Command{
		Use:   "swap POLICY [MODULE]",
		Short: "Replace a policy of a running host, under load",
		Long: `Replaces the module of a policy, in all its roles, without interrupting sessions. POLICY is a name from
kvhost policy list. The command first checks the new module as kvhost policy check does, with 65,536 slots, which takes
seconds. Then the host opens the module with its own limits and replays the resident entries to it. If the module has findings,
is refused or fails, the old one stays, and the exit code is 5. Without MODULE the policy restarts from its file with the
given settings, without a check.

The change lasts until the host restarts or reloads its configuration (SIGHUP). To keep it, write it to the
configuration.`,
		Example: `  kvhost policy swap lru ./mine.wasm --sha256 4f0c...
  kvhost policy swap prefix --set window=20`,
		Args: wantArgs(2, "the name of a policy, and a module"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Name = args[0]
			if len(args) == 2 {
				q.Module = modulePath(args[1])
			}
			if q.Module != "" && !unchecked {
				st, err := r.status(cmd.Context())
				if err != nil {
					return err // without a host, the check is not worth seconds
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
	cmd.Flags().BoolVar(&unchecked, "unchecked", false, "do not check the module first; the host's own test covers less")
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

// judge refuses a module for which a short policy check has findings. A module that only the host can find by its name is not
// checked.
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
			if len(r.Calls) > 0 { // the module starts, so a host accepts it
				next += ", --unchecked leaves it to the host's own tests"
			}
			return fmt.Errorf("%w: %s: %v; %s", errFindings, q.Module, &r.Findings[0], next)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: checked, no findings\n", q.Module)
		return nil
	})
}

// modulePath makes a path absolute, because the host has another working directory. A name stays unchanged.
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
			fmt.Fprintf(w, "  evict %s: replaced %s, handover by %s, %d entries, %.3f s\n", t.Root, observe.Short(t.From),
				proto.Word(t.Handover), t.Entries, t.Time.AsDuration().Seconds())
		} else {
			fmt.Fprintf(w, "  %s: replaced %s\n", proto.Word(t.Role), observe.Short(t.From))
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
		Args: wantArgs(1, "the name of one shadow"),
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
	cmd.Flags().StringVar(&q.Root, "root", "", "root from which it shall evict (default: all)")
	return cmd
}
