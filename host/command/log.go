package command

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/lmittmann/tint"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/plain"
)

// newLog returns a logger to standard error: text on a terminal and JSON otherwise, unless the configuration sets the format.
// Its level can be changed.
func newLog(c *config.Log) (*slog.Logger, *slog.LevelVar) {
	level := &slog.LevelVar{}
	_ = level.UnmarshalText([]byte(c.Level)) // cannot fail: the level is one of the choices
	terminal := term.IsTerminal(int(os.Stderr.Fd()))
	if c.Format == config.FormatText || c.Format == config.FormatAuto && terminal {
		return slog.New(tint.NewTextHandler(os.Stderr, &tint.Options{Level: level, TimeFormat: time.TimeOnly, ReplaceAttr: asText,
			NoColor: !terminal})), level
	}
	return slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: asText})), level
}

// stdout makes names that others have chosen safe to show.
var stdout = plain.Writer(standardOutput{})

type standardOutput struct{}

// Write implements [io.Writer].
func (standardOutput) Write(p []byte) (int, error) { return os.Stdout.Write(p) }

// asText converts values with a text form to that text. In JSON, a duration would otherwise be a number of nanoseconds, and an
// enumeration a number. Errors lose the names of packages.
func asText(_ []string, a slog.Attr) slog.Attr {
	if err, ok := a.Value.Any().(error); ok {
		return slog.String(a.Key, plain.Text(plainError(err)))
	}
	if a.Value.Kind() == slog.KindString {
		return slog.String(a.Key, plain.Text(a.Value.String()))
	}
	if s, ok := a.Value.Any().(fmt.Stringer); ok && a.Value.Kind() != slog.KindTime {
		a.Value = slog.StringValue(plain.Text(s.String()))
	}
	return a
}
