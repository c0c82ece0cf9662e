package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/proto"
)

func newTop() *cobra.Command {
	r := running{looks: true}
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
			if _, err := r.status(cmd.Context()); err != nil {
				return err
			}
			fd := int(os.Stdout.Fd())
			if !term.IsTerminal(fd) {
				return usageError{errors.New("top draws on a terminal, and standard output is none: use kvhost status, or kvhost status --json")}
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			top := topScreen{
				out: os.Stdout,
				size: func() (int, int) {
					if columns, lines, err := term.GetSize(fd); err == nil && columns > 0 && lines > 0 {
						return columns, lines
					}
					return 80, 24
				},
				ask:   r.status,
				every: every,
			}
			return top.run(ctx)
		},
	}
	r.addTo(cmd)
	cmd.Flags().DurationVar(&every, "every", every, "time between two drawings")
	return cmd
}

// Escape sequences of ECMA-48 and xterm.
const (
	secondScreen = "\x1b[?1049h\x1b[?25l" // enter it, and hide the cursor
	firstScreen  = "\x1b[?25h\x1b[?1049l"
	home         = "\x1b[H"
	restOfLine   = "\x1b[K" // erase it
	restOfScreen = "\x1b[J"
)

// topScreen draws a host's status on a terminal again and again, until ctx ends.
type topScreen struct {
	out   io.Writer // the terminal
	size  func() (columns, lines int)
	ask   func(context.Context) (*proto.StatusResponse, error)
	every time.Duration // between two drawings
}

// longestAnswer bounds the wait for a status.
const longestAnswer = 5 * time.Second

// run returns nil when ctx ends, and an error when the terminal takes nothing.
func (t *topScreen) run(ctx context.Context) error {
	_, err := io.WriteString(t.out, secondScreen)
	if err != nil {
		return err
	}
	defer io.WriteString(t.out, firstScreen)
	again := time.NewTicker(t.every)
	defer again.Stop()
	var before, now *proto.StatusResponse
	for {
		ask, stop := context.WithTimeout(ctx, longestAnswer)
		status, err := t.ask(ask)
		stop()
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			before, now = now, status
			if before == nil {
				before = now
			}
		}
		if _, err := io.WriteString(t.out, t.frame(before, now, err)); err != nil {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// frame is what fits the terminal of a status, which is nil before the first answer, and of the failure of the last question.
func (t *topScreen) frame(before, now *proto.StatusResponse, failure error) string {
	var lines []string
	if now != nil {
		lines = strings.Split(strings.TrimRight(drawScreen(before, now), "\n"), "\n")
	}
	columns, most := t.size()
	foot := ""
	if more := len(lines) - (most - 1); more > 0 {
		lines = lines[:len(lines)-more]
		foot = fmt.Sprintf("%d more lines: kvhost status", more)
	}
	if failure != nil {
		foot = "no answer: " + strings.ReplaceAll(plainError(failure), "\n", " ")
	}
	var b strings.Builder
	b.WriteString(home)
	for _, l := range append(lines, foot) {
		if r := []rune(l); len(r) > columns {
			l = string(r[:columns])
		}
		b.WriteString(paint(l) + restOfLine + "\n")
	}
	return strings.TrimSuffix(b.String(), "\n") + restOfScreen
}
