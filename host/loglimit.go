package host

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Guests and clients can cause many log lines of a host, for example a policy that fails on every call, or a client that breaks
// a rule in every message. The lines must not fill a disk or cost the host its time. Lines with the same message and level may
// come logBurst at a time, and then one per logEvery.
const (
	logBurst = 20
	logEvery = time.Second
)

// maxLogMessages is the maximum number of messages with a limit of their own. A host has a few hundred. All further messages
// share one limit.
const maxLogMessages = 1024

// suppressedLines is the attribute that counts the lines left out since the last line with the same message.
const suppressedLines = "suppressed"

// limitLog returns a handler that passes records on to next within the limits. Debug records are not limited. Nor are records
// with the messages in except, because their callers limit them.
func limitLog(next slog.Handler, except ...string) slog.Handler {
	return &logLimit{next, &logLimits{except: except, messages: map[logMessage]*logBucket{}}}
}

type logLimit struct {
	slog.Handler
	*logLimits
}

// logLimits is shared by a handler and all handlers that are derived from it.
type logLimits struct {
	except []string

	mu       sync.Mutex
	messages map[logMessage]*logBucket
}

type logMessage struct {
	text  string
	level slog.Level
}

type logBucket struct {
	lines      float64 // lines that may come now
	at         time.Time
	suppressed int
}

func (h *logLimit) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && !slices.Contains(h.except, r.Message) {
		suppressed, ok := h.take(logMessage{r.Message, r.Level}, r.Time)
		if !ok {
			return nil
		}
		if suppressed > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Int(suppressedLines, suppressed))
		}
	}
	return h.Handler.Handle(ctx, r)
}

// take asks for permission for a line. suppressed is the number of lines refused since the last permitted one.
func (l *logLimits) take(m logMessage, now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.messages[m]
	if b == nil {
		if len(l.messages) >= maxLogMessages {
			m = logMessage{}
		}
		if b = l.messages[m]; b == nil {
			b = &logBucket{lines: logBurst, at: now}
			l.messages[m] = b
		}
	}
	b.lines = min(logBurst, b.lines+max(0, now.Sub(b.at)).Seconds()/logEvery.Seconds())
	b.at = now
	if b.lines < 1 {
		b.suppressed++
		return 0, false
	}
	b.lines--
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}

func (h *logLimit) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &logLimit{h.Handler.WithAttrs(attrs), h.logLimits}
}

func (h *logLimit) WithGroup(name string) slog.Handler {
	return &logLimit{h.Handler.WithGroup(name), h.logLimits}
}
