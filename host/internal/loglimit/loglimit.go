// Package loglimit limits how often a log repeats itself. Guests and clients can cause many of a host's log lines: a policy
// that fails on every call, a client that breaks a rule on every message. They must not fill a disk or cost the host its
// time.
package loglimit

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Lines of one message and level may come Burst at a time and then one per Every.
const (
	Burst = 20
	Every = time.Second
)

// maxMessages bounds the messages that are counted apart. A host has a few hundred; what is beyond shares one limit.
const maxMessages = 1024

// Suppressed is the attribute that counts the lines left out since the last line with the same message.
const Suppressed = "suppressed"

// New returns a handler that passes records on to next within the limits. Debug records are not limited, nor are those
// with the messages of except, whose callers limit them.
func New(next slog.Handler, except ...string) slog.Handler {
	return &handler{next, &limits{except: except, messages: map[message]*bucket{}}}
}

type handler struct {
	next slog.Handler
	*limits
}

// limits are shared by a handler and all that are derived from it.
type limits struct {
	except []string

	mu       sync.Mutex
	messages map[message]*bucket
}

type message struct {
	text  string
	level slog.Level
}

type bucket struct {
	lines      float64 // that may come now
	at         time.Time
	suppressed int
}

func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && !slices.Contains(h.except, r.Message) {
		suppressed, ok := h.take(message{r.Message, r.Level}, r.Time)
		if !ok {
			return nil
		}
		if suppressed > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Int(Suppressed, suppressed))
		}
	}
	return h.next.Handle(ctx, r)
}

// take asks for a line. suppressed is how many were refused before it.
func (l *limits) take(m message, now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.messages[m]
	if b == nil {
		if len(l.messages) >= maxMessages {
			m = message{}
		}
		if b = l.messages[m]; b == nil {
			b = &bucket{lines: Burst, at: now}
			l.messages[m] = b
		}
	}
	b.lines = min(Burst, b.lines+max(0, now.Sub(b.at)).Seconds()/Every.Seconds())
	b.at = now
	if b.lines < 1 {
		b.suppressed++
		return 0, false
	}
	b.lines--
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.next.WithAttrs(attrs), h.limits}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.next.WithGroup(name), h.limits}
}
