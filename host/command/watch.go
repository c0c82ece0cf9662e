package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// leastWatch is the shortest interval between two drawings.
const leastWatch = 100 * time.Millisecond

// watch draws a running host's status repeatedly until Ctrl-C.
func watch(ctx context.Context, r *running, every time.Duration) error {
	if every < leastWatch {
		return usageError{fmt.Errorf("--watch: %s, want at least %s", every, leastWatch)}
	}
	if _, err := r.status(ctx); err != nil {
		return err
	}
	fd := int(os.Stdout.Fd())
	if !term.IsTerminal(fd) {
		return usageError{errors.New("--watch draws on a terminal, and standard output is none: leave it out, or use --json")}
	}
	ctx, stop := untilSignal(ctx)
	defer stop()
	screen := watchScreen{
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
	return screen.run(ctx)
}

// Escape sequences of ECMA-48 and xterm.
const (
	secondScreen = "\x1b[?1049h\x1b[?25l" // enters it and hides the cursor
	firstScreen  = "\x1b[?25h\x1b[?1049l"
	home         = "\x1b[H"
	restOfLine   = "\x1b[K" // erases it
	restOfScreen = "\x1b[J"
)

// watchScreen draws a host's status on a terminal repeatedly until ctx ends.
type watchScreen struct {
	out   io.Writer // the terminal
	size  func() (columns, lines int)
	ask   func(context.Context) (*proto.StatusResponse, error)
	every time.Duration // interval between two drawings
}

// longestAnswer is the longest wait for a status.
const longestAnswer = 5 * time.Second

// run returns nil when ctx ends, and an error if it cannot write to the terminal.
func (w *watchScreen) run(ctx context.Context) error {
	_, err := io.WriteString(w.out, secondScreen)
	if err != nil {
		return err
	}
	defer io.WriteString(w.out, firstScreen)
	again := time.NewTicker(w.every)
	defer again.Stop()
	var before, now *proto.StatusResponse
	for {
		ask, stop := context.WithTimeout(ctx, longestAnswer)
		status, err := w.ask(ask)
		stop()
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			before, now = cmp.Or(now, status), status
		}
		if _, err := io.WriteString(w.out, w.frame(before, now, err)); err != nil {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// frame returns the part of a status that fits the terminal, with the error of the last request if it failed. now is nil before
// the first answer.
func (w *watchScreen) frame(before, now *proto.StatusResponse, failure error) string {
	var lines []string
	if now != nil {
		lines = strings.Split(strings.TrimRight(drawScreen(before, now), "\n"), "\n")
	}
	columns, most := w.size()
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
