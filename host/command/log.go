package command

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lmittmann/tint"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/config"
)

var levels = map[string]slog.Level{
	config.LevelDebug: slog.LevelDebug, config.LevelInfo: slog.LevelInfo, config.LevelWarn: slog.LevelWarn,
	config.LevelError: slog.LevelError,
}

// newLog logs to standard error: text on a terminal, JSON otherwise, unless the configuration says which.
func newLog(c *config.Log) (*slog.Logger, *logLevel) {
	level := &logLevel{}
	level.configure(levels[c.Level])
	terminal := term.IsTerminal(int(os.Stderr.Fd()))
	if c.Format == config.FormatText || c.Format == config.FormatAuto && terminal {
		return slog.New(tint.NewTextHandler(os.Stderr, &tint.Options{Level: level, TimeFormat: time.TimeOnly,
			NoColor: !terminal})), level
	}
	return slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: asText})), level
}

// asText gives what has a text as that text: in JSON a duration would be nanoseconds, and an enumeration a number.
func asText(_ []string, a slog.Attr) slog.Attr {
	if s, ok := a.Value.Any().(fmt.Stringer); ok && a.Value.Kind() != slog.KindTime {
		a.Value = slog.StringValue(s.String())
	}
	return a
}

// logLevel is the least severe level that is logged.
type logLevel struct {
	slog.LevelVar
	configured atomic.Int64
}

// configure sets the level that the configuration has.
func (l *logLevel) configure(to slog.Level) {
	l.configured.Store(int64(to))
	l.Set(to)
}

// toggleDebug switches between debug and the configured level (at least info) at each SIGUSR2, until it is stopped.
func toggleDebug(log *slog.Logger, level *logLevel) func() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range signals {
			next := slog.LevelDebug
			if level.Level() == slog.LevelDebug {
				next = max(slog.Level(level.configured.Load()), slog.LevelInfo)
			}
			level.Set(next)
			log.Info("log level switched", "to", next.String())
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}
