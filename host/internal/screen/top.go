package screen

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Escape sequences of ECMA-48 and xterm.
const (
	secondScreen = "\x1b[?1049h\x1b[?25l" // enter it, and hide the cursor
	firstScreen  = "\x1b[?25h\x1b[?1049l"
	home         = "\x1b[H"
	restOfLine   = "\x1b[K" // erase it
	restOfScreen = "\x1b[J"
)

// Top draws a host's status on a terminal again and again, until ctx ends.
type Top struct {
	Out   io.Writer // the terminal
	Size  func() (columns, lines int)
	Ask   func(context.Context) (*proto.StatusReply, error)
	Every time.Duration // between two drawings
}

// longestAnswer bounds the wait for a status.
const longestAnswer = 5 * time.Second

// Run returns nil when ctx ends, and an error when the terminal takes nothing.
func (t *Top) Run(ctx context.Context) error {
	_, err := io.WriteString(t.Out, secondScreen)
	if err != nil {
		return err
	}
	defer io.WriteString(t.Out, firstScreen)
	again := time.NewTicker(t.Every)
	defer again.Stop()
	var before, now *proto.StatusReply
	for {
		ask, stop := context.WithTimeout(ctx, longestAnswer)
		status, err := t.Ask(ask)
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
		if _, err := io.WriteString(t.Out, t.frame(before, now, err)); err != nil {
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
func (t *Top) frame(before, now *proto.StatusReply, failure error) string {
	var lines []string
	if now != nil {
		lines = strings.Split(strings.TrimRight(Draw(before, now), "\n"), "\n")
	}
	columns, most := t.Size()
	foot := ""
	if more := len(lines) - (most - 1); more > 0 {
		lines = lines[:len(lines)-more]
		foot = fmt.Sprintf("%d more lines: kvhost status", more)
	}
	if failure != nil {
		foot = "no answer: " + strings.ReplaceAll(Plain(failure), "\n", " ")
	}
	var b strings.Builder
	b.WriteString(home)
	for _, l := range append(lines, foot) {
		if r := []rune(l); len(r) > columns {
			l = string(r[:columns])
		}
		b.WriteString(l + restOfLine + "\n")
	}
	return strings.TrimSuffix(b.String(), "\n") + restOfScreen
}
