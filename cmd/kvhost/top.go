package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/screen"
)

func newTop() *cobra.Command {
	var r running
	every := time.Second
	cmd := &cobra.Command{
		Use:     "top",
		Short:   "Watch a running host",
		Long:    `Shows what kvhost status shows and draws it anew each second. Keys: q ends, space pauses, up and down scroll.`,
		Example: `  kvhost top --socket /run/kvhost/kvhost.sock`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usageError{fmt.Errorf("--every: %s, want at least 100ms", every)}
			}
			if _, err := ask(cmd.Context(), &r, hostStatus, &proto.StatusRequest{}); err != nil {
				return err
			}
			_, err := tea.NewProgram(&screen.Top{
				Ask: func(ctx context.Context) (*proto.StatusReply, error) {
					return ask(ctx, &r, hostStatus, &proto.StatusRequest{})
				},
				Every: every,
			}, tea.WithContext(cmd.Context()), tea.WithAltScreen()).Run()
			if errors.Is(err, tea.ErrInterrupted) || cmd.Context().Err() != nil {
				return nil
			}
			return err
		},
	}
	r.addTo(cmd)
	cmd.Flags().DurationVar(&every, "every", every, "time between two drawings")
	return cmd
}
