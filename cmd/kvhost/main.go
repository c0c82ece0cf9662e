// Command kvhost runs a KV-cache offload host and the tools around it. It holds flags and subcommands only; the work
// is done in package host and the packages below it.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/host/screen"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(run(context.Background(), os.Args[1:])) }

// run is main without the exit. It prints the error, if any, and returns the exit code.
func run(ctx context.Context, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	code := exitCode(err)
	if err != nil {
		fmt.Fprintf(os.Stderr, "kvhost: %s\n", screen.Plain(err))
	}
	if code == exitUsage {
		fmt.Fprintf(os.Stderr, "kvhost: see %s --help\n", cmd.CommandPath())
	}
	return code
}
