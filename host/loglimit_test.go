package host

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// lines keeps what is logged, as "message key=value ...".
type lines struct{ list *[]string }

func (l lines) Enabled(context.Context, slog.Level) bool { return true }
func (l lines) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l lines) WithGroup(string) slog.Handler            { return l }
func (l lines) Handle(_ context.Context, r slog.Record) error {
	text := []string{r.Message}
	r.Attrs(func(a slog.Attr) bool { text = append(text, a.String()); return true })
	*l.list = append(*l.list, strings.Join(text, " "))
	return nil
}

func TestLogLimits(t *testing.T) {
	var got []string
	h := limitLog(lines{&got}, "limited already")
	now := time.Unix(1, 0)
	say := func(h slog.Handler, level slog.Level, text string, n int) {
		for range n {
			testenv.OK(t, h.Handle(t.Context(), slog.NewRecord(now, level, text, 0)))
		}
	}
	count := func(text string) (n int) {
		for _, line := range got {
			if line == text {
				n++
			}
		}
		return n
	}
	derived := h.WithAttrs([]slog.Attr{slog.Int("policy", 1)}).WithGroup("g")
	say(h, slog.LevelError, "failed", 600)
	say(derived, slog.LevelError, "failed", 400) // shares the limit
	say(h, slog.LevelWarn, "failed", 30)         // another level
	say(h, slog.LevelInfo, "started", 5)
	say(h, slog.LevelDebug, "detail", 500)
	say(h, slog.LevelError, "limited already", 300)
	if count("limited already") != 300 {
		t.Errorf("%d lines of an exception", count("limited already"))
	}
	if count("failed") != 2*logBurst || count("started") != 5 || count("detail") != 500 {
		t.Errorf("%d, %d, %d lines", count("failed"), count("started"), count("detail"))
	}
	now = now.Add(logEvery)
	say(h, slog.LevelError, "failed", 10)
	if count("failed suppressed=980") != 1 || count("failed") != 2*logBurst {
		t.Errorf("after a pause: %v", got[len(got)-2:])
	}
	now = now.Add(time.Hour)
	say(h, slog.LevelError, "failed", logBurst+1)
	if count("failed suppressed=9") != 1 || count("failed") != 3*logBurst-1 {
		t.Errorf("after an hour: %d lines", count("failed"))
	}
}

// Messages that differ each time share one limit in the end, and take no memory.
func TestManyMessages(t *testing.T) {
	var got []string
	h := limitLog(lines{&got}).(*logLimit)
	for i := range 10 * maxLogMessages {
		testenv.OK(t, h.Handle(t.Context(), slog.NewRecord(time.Unix(1, 0), slog.LevelWarn, fmt.Sprint(i), 0)))
	}
	if len(got) != maxLogMessages+logBurst || len(h.messages) > maxLogMessages+1 || !slices.Contains(got, "0") {
		t.Errorf("%d lines, %d messages kept", len(got), len(h.messages))
	}
}
