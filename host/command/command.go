// Package command is the command line of kvhost: flags and subcommands only. The work is done in package host and in the
// packages below it.
package command

import (
	"context"
	"fmt"
	"os"
)

// version is what the linker has set.
var version = "dev"

// Main runs the command line of a binary of a version. It prints the error, if any, and returns the exit code.
func Main(ctx context.Context, release string, args []string) int {
	version = release
	return run(ctx, args)
}

func run(ctx context.Context, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	code := exitCode(err)
	if err != nil {
		fmt.Fprintf(os.Stderr, "kvhost: %s\n", plainError(err))
	}
	if code == exitUsage {
		fmt.Fprintf(os.Stderr, "kvhost: see %s --help\n", cmd.CommandPath())
	}
	return code
}
