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

// newLog logs to standard error: text on a terminal, JSON otherwise, unless the configuration says which. The level can be changed.
func newLog(c *config.Log) (*slog.Logger, *slog.LevelVar) {
	level := &slog.LevelVar{}
	_ = level.UnmarshalText([]byte(c.Level)) // it is a choice
	terminal := term.IsTerminal(int(os.Stderr.Fd()))
	if c.Format == config.FormatText || c.Format == config.FormatAuto && terminal {
		return slog.New(tint.NewTextHandler(os.Stderr, &tint.Options{Level: level, TimeFormat: time.TimeOnly, ReplaceAttr: asText,
			NoColor: !terminal})), level
	}
	return slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: asText})), level
}

// stdout shows what others have named as text.
var stdout = plain.Writer(standardOutput{})

type standardOutput struct{}

// Write implements [io.Writer].
func (standardOutput) Write(p []byte) (int, error) { return os.Stdout.Write(p) }

// asText gives what has a text as that text: in JSON a duration would be nanoseconds, and an enumeration a number. Errors are plain.
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
