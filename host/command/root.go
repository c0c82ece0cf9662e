package command

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
)

func newRoot() *cobra.Command {
	serve := newServe()
	var showVersion bool
	root := &cobra.Command{
		Use:   "kvhost",
		Short: "Host for LLM KV-cache chunks on storage, with its policy in WebAssembly",
		Long: `kvhost keeps the KV cache of LLM serving engines on storage. Policies decide where chunks go and
which of them stay: WebAssembly modules, embedded or your own.

Without a command it serves: clients on a Unix socket, probes, metrics and a page over HTTP.`,
		Example: serve.Example,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if showVersion {
				fmt.Fprintln(cmd.OutOrStdout(), "kvhost", version)
				return nil
			}
			return serve.RunE(cmd, args)
		},
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.Flags().SortFlags = false
	root.Flags().AddFlagSet(serve.Flags())
	// cobra's own version flag would keep text/template in the program, and with it every exported method.
	root.Flags().BoolVarP(&showVersion, "version", "v", false, "version for kvhost")
	cobra.EnableCommandSorting = false
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
	}
	group(root, groupServe, serve, newReload(), newStatus(), newCheck(), newConfig(), newBench())
	group(root, groupRoots, newFsck())
	group(root, groupPolicy, newPolicy(), newSim(), newReplay())
	group(root, groupOther, newVersion())
	addHelp(root)
	addCompletion(root)
	return root
}

// wantArgs returns a function that refuses too few or too many arguments. Its error says what the command needs.
func wantArgs(most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 || len(args) > most {
			return usageError{fmt.Errorf("%s: want %s", cmd.CommandPath(), what)}
		}
		return nil
	}
}

// wantCommand makes a command refuse to run without a subcommand.
func wantCommand(cmd *cobra.Command) {
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return usageError{fmt.Errorf("%s: want one of %s", cmd.CommandPath(), strings.Join(commandsOf(cmd), ", "))}
	}
}

// noArgs refuses arguments, and suggests the command that was probably intended.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if !cmd.HasSubCommands() {
		return usageError{fmt.Errorf("%s takes no arguments, not %q", cmd.CommandPath(), args[0])}
	}
	if strings.HasSuffix(args[0], ".toml") {
		return usageError{fmt.Errorf("unknown command %q; a configuration is --config %s", args[0], args[0])}
	}
	if args[0] == "top" {
		return usageError{errors.New("kvhost top is gone: kvhost status --watch draws the same")}
	}
	more := config.Suggest(args[0], commandsOf(cmd))
	if more == "" && cmd.HasParent() { // the program itself has too many commands for one line
		more = "; want one of " + strings.Join(commandsOf(cmd), ", ")
	}
	return usageError{fmt.Errorf("unknown command %q%s", args[0], more)}
}

// commandsOf returns the names of a command's subcommands.
func commandsOf(cmd *cobra.Command) (names []string) {
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return names
}
