package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

func newRoot() *cobra.Command {
	serve := newServe()
	root := &cobra.Command{
		Use:   "kvhost",
		Short: "Host for LLM KV-cache chunks on storage, with its policy in WebAssembly",
		Long: `kvhost moves KV-cache chunks between serving engines and storage. Where chunks go and which of them stay is decided
by policies: WebAssembly modules, embedded or your own.

Without a subcommand it serves: a Unix socket for clients, and a read-only HTTP listener on loopback. SIGINT and SIGTERM
end it cleanly; SIGUSR2 switches debug logging on and off.

` + exitHelp,
		Example:       serve.Example,
		Version:       version,
		Args:          noArgs,
		RunE:          serve.RunE,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetVersionTemplate("kvhost {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.Flags().AddFlagSet(serve.Flags())
	root.AddCommand(serve, newReplay(), newSim(), newTrace(), newFsck(), newJanitor(), newCheck(), newBench(), newPolicy(), newConfig(), newVersion())
	return root
}

// noArgs refuses arguments, and guesses which command was meant.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if !cmd.HasSubCommands() {
		return usageError{fmt.Errorf("%s takes no arguments, not %q", cmd.CommandPath(), args[0])}
	}
	hint := ""
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		hint = "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return usageError{fmt.Errorf("unknown command %q%s", args[0], hint)}
}
