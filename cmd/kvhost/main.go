// Command kvhost runs a KV-cache offload host and the tools around it. It holds flags and subcommands only; the work
// is done in package host and the packages below it.
package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
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
		fmt.Fprintf(os.Stderr, "kvhost: %s\n", plain(err))
	}
	if code == exitUsage {
		fmt.Fprintf(os.Stderr, "kvhost: see %s --help\n", cmd.CommandPath())
	}
	return code
}

// packages are the names of packages that their errors begin with, for developers.
var packages = regexp.MustCompile(`(^|[:;] |\n)(?:(?:budget|capacity|catalog|chunk|client|compiler|config|doctor|fsck|gds|host|` +
	`janitor|kvhost|meter|minisign|pathbench|policy|regular|replay|sandbox|server|sim|staging|store|trace|transfer|web): )+`)

// plain is an error's text without the names of packages.
func plain(err error) string { return packages.ReplaceAllString(err.Error(), "$1") }
