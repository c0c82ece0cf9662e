// Package command is the command line of kvhost. It has flags and subcommands only, and the work is done in package host and
// the packages below it.
package command

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/kvhost/kvhost/host/internal/plain"
)

// version is set by the linker.
var version = "dev"

// Main runs the command line of a binary of a given release. It prints the error, if any, and returns the exit code.
func Main(ctx context.Context, release string, args []string) int {
	version = release
	return run(ctx, args)
}

func run(ctx context.Context, args []string) int {
	root := newRoot()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(args...)
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		wantCommand(c)
	}
	if cmd, _, _ := root.Find(args); cmd == root && len(args) == 2 && !strings.HasPrefix(args[0], "-") &&
		slices.Contains([]string{"-h", "--help"}, args[1]) {
		args = args[:1] // no command has that name, and the help would not say so
	}
	root.SetArgs(args)
	root.SetOut(stdout)
	cmd, err := root.ExecuteContextC(ctx)
	code := exitCode(err)
	if err != nil {
		fmt.Fprintf(os.Stderr, "kvhost: %s\n", plain.Text(plainError(err)))
	}
	if code == exitUsage {
		fmt.Fprintf(os.Stderr, "kvhost: see %s --help\n", cmd.CommandPath())
	}
	return code
}

// untilSignal returns a context that is done when the user or the service manager asks the process to end.
func untilSignal(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
}
