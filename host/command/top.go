package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/screen"
)

func newTop() *cobra.Command {
	var r running
	every := time.Second
	cmd := &cobra.Command{
		Use:     "top",
		Short:   "Watch a running host",
		Long:    `Shows on a terminal what kvhost status shows, and draws it anew each second until Ctrl-C.`,
		Example: `  kvhost top --socket /run/kvhost/kvhost.sock`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usageError{fmt.Errorf("--every: %s, want at least 100ms", every)}
			}
			if _, err := ask(cmd.Context(), &r, hostStatus, &proto.StatusRequest{}); err != nil {
				return err
			}
			fd := int(os.Stdout.Fd())
			if !term.IsTerminal(fd) {
				return usageError{errors.New("top draws on a terminal, and standard output is none: use kvhost status, or kvhost status --json")}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			top := screen.Top{
				Out: os.Stdout,
				Size: func() (int, int) {
					if columns, lines, err := term.GetSize(fd); err == nil && columns > 0 && lines > 0 {
						return columns, lines
					}
					return 80, 24
				},
				Ask: func(ctx context.Context) (*proto.StatusReply, error) {
					return ask(ctx, &r, hostStatus, &proto.StatusRequest{})
				},
				Every: every,
			}
			return top.Run(ctx)
		},
	}
	r.addTo(cmd)
	cmd.Flags().DurationVar(&every, "every", every, "time between two drawings")
	return cmd
}
