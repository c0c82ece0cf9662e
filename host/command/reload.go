package command

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/proto"
)

func newReload() *cobra.Command {
	var r running
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Make a running host read its configuration again, and print the result",
		Long: `Makes a running host read its configuration again, from the file and with the flags and variables that it was started
with. Waits for the result and prints the changed keys. The host applies all changes or, after an error, none. The exit code is
12 if the configuration cannot be read or changes a key that needs a restart, and 5 if a policy is refused.`,
		Example: `  kvhost reload --config /etc/kvhost/kvhost.toml
  systemctl reload kvhost`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := ask(cmd.Context(), &r, proto.NewAdminServiceClient, proto.AdminServiceClient.Reload, &proto.ReloadRequest{})
			if err != nil {
				return fmt.Errorf("not reloaded, nothing changed: %w", err)
			}
			changed := "nothing had changed"
			if len(a.Changed) > 0 {
				changed = strings.Join(a.Changed, ", ")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "reloaded: %s\n", changed)
			return nil
		},
	}
	r.addTo(cmd)
	return cmd
}

// reloadOnHangup makes the host read its configuration again at each SIGHUP, until the returned function is called.
func reloadOnHangup(ctx context.Context, h *host.Host) func() {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-ctx.Done():
				return
			case <-signals:
				_, _ = h.Reread(ctx) // Reread logs the result
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		cancel()
		<-over
	}
}
