package command

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/plugins/dist"
)

// valued holds the flags with values that can be completed, in addition to the choices of settings. Values of other flags
// complete to file names.
var valued = map[string]cobra.CompletionFunc{
	"policy": modules, "level-policy": modules, "admit": modules, "config": files("toml"),
	"root": directories, "store": directories, "policy-dir": directories, "policy-cache": directories,
}

// addCompletion sets how the flags and arguments of a command and of its subcommands are completed.
func addCompletion(cmd *cobra.Command) {
	switch path := cmd.CommandPath(); path {
	case "kvhost fsck":
		cmd.ValidArgsFunction = directories
	case "kvhost policy check", "kvhost policy inspect", "kvhost policy pack":
		cmd.ValidArgsFunction = modules
	case "kvhost policy swap", "kvhost policy promote":
		cmd.ValidArgsFunction = livePolicies
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if complete := valued[f.Name]; complete != nil {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, complete) // fails for a flag that two commands share, which is registered already
		}
	})
	for _, c := range cmd.Commands() {
		addCompletion(c)
	}
}

// modules completes to the embedded policies, and to files in the directory that is being typed.
func modules(_ *cobra.Command, _ []string, begun string) (list []string, _ cobra.ShellCompDirective) {
	for _, name := range dist.Names() {
		list = append(list, name+".wasm")
	}
	here, _ := filepath.Glob(begun + "*.wasm") // an invalid pattern matches no file
	if list = append(list, here...); strings.Contains(begun, "/") {
		return []string{"wasm"}, cobra.ShellCompDirectiveFilterFileExt
	}
	return list, cobra.ShellCompDirectiveDefault
}

func directories(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveFilterDirs
}

func files(ending string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{ending}, cobra.ShellCompDirectiveFilterFileExt
	}
}

// livePolicies completes to the policies of the running host, and for promote to its shadows. The second argument of swap is a
// module.
func livePolicies(cmd *cobra.Command, args []string, begun string) (list []string, _ cobra.ShellCompDirective) {
	if len(args) == 1 && cmd.Name() == "swap" {
		return modules(cmd, args, begun)
	}
	var r running
	r.socket, _ = cmd.Flags().GetString("socket")
	r.file, _ = cmd.Flags().GetString("config")
	st, err := r.status(cmd.Context())
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	for _, p := range st.Policies {
		if cmd.Name() == "swap" || p.State == proto.PolicyState_POLICY_STATE_SHADOW {
			list = append(list, p.Name+"\t"+proto.Word(p.Role)+", "+p.Module)
		}
	}
	return slices.Compact(list), cobra.ShellCompDirectiveNoFileComp // several roots may have the same policy
}
