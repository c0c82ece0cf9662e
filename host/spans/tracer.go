package spans

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Config says which requests get spans, and where those go.
type Config struct {
	Endpoint string      // URL of [Endpoint]; empty: nowhere, and no request gets one
	Headers  http.Header // of each export
	Ratio    float64     // of the requests whose client names no parent
	Timeout  time.Duration
}

// Bounds of what waits for the collector: some 3 MiB.
const (
	queued = 2048
	batch  = 512
	delay  = time.Second // that a span waits for others to be sent with
	closes = time.Second // for what is left at the end
)

// Tracer begins spans and sends those that end. A nil Tracer begins none.
type Tracer struct {
	log      *slog.Logger
	version  string
	resource []Attribute
	current  atomic.Pointer[settings] // nil: off
	queue    chan []byte

	exported, dropped, failed atomic.Uint64

	mu      sync.Mutex
	stop    context.CancelFunc // of the exporter's goroutine; nil: there is none
	stopped chan struct{}
	closed  bool
}

// settings are a Config that spans are sent by until the next.
type settings struct {
	Config
	replaced context.Context // done when other settings are in force
	replace  context.CancelFunc
	client   *http.Client
}

// New makes a tracer that is off. resource says whose spans they are: see [Resource].
func New(version string, resource []Attribute, log *slog.Logger) *Tracer {
	return &Tracer{log: log, version: version, resource: resource, queue: make(chan []byte, queued)}
}

// Set puts a configuration in force, also for what waits for the collector.
func (t *Tracer) Set(c Config) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	var next *settings
	if c.Endpoint != "" {
		next = &settings{Config: c, client: newClient()}
		next.replaced, next.replace = context.WithCancel(context.Background())
		if t.stop == nil {
			var ctx context.Context
			ctx, t.stop = context.WithCancel(context.Background())
			t.stopped = make(chan struct{})
			go t.export(ctx)
		}
	}
	t.put(next)
}

// put replaces the settings.
func (t *Tracer) put(next *settings) {
	if old := t.current.Swap(next); old != nil {
		old.replace()
		old.client.CloseIdleConnections()
	}
}

// add queues an encoded span, or drops it.
func (t *Tracer) add(span []byte) {
	select {
	case t.queue <- span:
	default:
		t.dropped.Add(1)
	}
}

// Close sends what is queued, for a second at most. Nothing is exported after it.
func (t *Tracer) Close() {
	t.mu.Lock()
	t.closed = true
	stop, stopped := t.stop, t.stopped
	t.mu.Unlock()
	if stop != nil {
		stop()
		<-stopped
	}
	t.put(nil)
}

// Stats count spans. Dropped ones found no room; failed ones were refused by the collector, or not taken in time.
type Stats struct {
	Exported, Dropped, Failed uint64
	Waiting                   int
}

// Stats reads the counters.
func (t *Tracer) Stats() Stats {
	return Stats{t.exported.Load(), t.dropped.Load(), t.failed.Load(), len(t.queue)}
}
