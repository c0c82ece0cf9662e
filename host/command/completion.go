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

// valued are the flags whose values can be completed, besides the choices of settings. Others complete to files.
var valued = map[string]cobra.CompletionFunc{
	"policy": modules, "level-policy": modules, "admit": modules, "config": files("toml"),
	"root": directories, "store": directories, "policy-dir": directories, "policy-cache": directories,
}

// addCompletion says of the commands below one how to complete their flags and arguments.
func addCompletion(cmd *cobra.Command) {
	switch path := cmd.CommandPath(); path {
	case "kvhost fsck":
		cmd.ValidArgsFunction = directories
	case "kvhost policy check", "kvhost policy step", "kvhost policy inspect", "kvhost policy pack":
		cmd.ValidArgsFunction = modules
	case "kvhost policy swap", "kvhost policy promote":
		cmd.ValidArgsFunction = livePolicies
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if complete := valued[f.Name]; complete != nil {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, complete) // of a flag of two commands once
		}
	})
	for _, c := range cmd.Commands() {
		addCompletion(c)
	}
}

// modules are the embedded policies, and files of the directory that is being typed.
func modules(_ *cobra.Command, _ []string, begun string) (list []string, _ cobra.ShellCompDirective) {
	for _, name := range dist.Names() {
		list = append(list, name+".wasm")
	}
	here, _ := filepath.Glob(begun + "*.wasm") // of a pattern that is none there is no file
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

// livePolicies are the policies of the running host; for promote its shadows. The second argument of swap is a module.
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
	return slices.Compact(list), cobra.ShellCompDirectiveNoFileComp // several roots have one
}
