package spans

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Config says which requests get spans, and where those go.
type Config struct {
	Endpoint string            // URL of [Endpoint]; empty: nowhere, and no request gets one
	Headers  map[string]string // of each export
	Ratio    float64           // of the requests whose client names no parent
	Timeout  time.Duration     // of one attempt to export
}

// Bounds of what waits for the collector: some 3 MiB.
const (
	queued = 2048
	batch  = 512
	delay  = time.Second // that a span waits for others to be sent with
	closes = time.Second // for what is left at the end
)

// longestText bounds the texts of attributes, in characters.
const longestText = 512

// Tracer begins spans and sends those that end. A nil Tracer begins none.
type Tracer struct {
	log      *slog.Logger
	version  string
	resource *resource.Resource
	current  atomic.Pointer[settings] // nil: off
	tracer   trace.Tracer             // is set before current is for the first time

	waiting                   atomic.Int64 // spans that the exporter has not taken from the queue
	exported, dropped, failed atomic.Uint64

	mu       sync.Mutex
	provider *sdk.TracerProvider // nil: spans were never on. Its goroutine ends in Close
	limit    context.Context     // ends all exports
	stop     context.CancelFunc
	closed   bool
}

// New makes a tracer that is off. Its spans name this host; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment
// go before that.
func New(version string, log *slog.Logger) *Tracer {
	name, _ := os.Hostname()
	r, err := resource.New(context.Background(), resource.WithAttributes(Text("service.name", "kvhost"), Text("service.version", version),
		Text("host.name", name)), resource.WithFromEnv())
	if err != nil {
		log.Warn("OTEL_RESOURCE_ATTRIBUTES cannot be read whole", "error", err)
	}
	t := &Tracer{log: log, version: version, resource: r}
	t.limit, t.stop = context.WithCancel(context.Background())
	return t
}

// Set puts a configuration in force, also for what waits for the collector.
func (t *Tracer) Set(c Config) {
	t.set(c, newClient(c.Timeout))
}

func (t *Tracer) set(c Config, client *http.Client) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	var next *settings
	if c.Endpoint != "" {
		var err error
		if next, err = newSettings(c, client); err != nil {
			t.log.Error("spans are not exported", "error", err)
		} else if t.provider == nil {
			t.open()
		}
	}
	t.put(next)
}

// open makes the queue, and the goroutine that sends what is in it.
func (t *Tracer) open() {
	t.provider = sdk.NewTracerProvider(sdk.WithResource(t.resource), sdk.WithSampler(sdk.AlwaysSample()), // Begin decides
		sdk.WithRawSpanLimits(sdk.SpanLimits{AttributeValueLengthLimit: longestText, AttributeCountLimit: -1, EventCountLimit: -1,
			LinkCountLimit: -1, AttributePerEventCountLimit: -1, AttributePerLinkCountLimit: -1}),
		sdk.WithSpanProcessor(&queue{t, sdk.NewBatchSpanProcessor(&exporter{of: t, well: true}, sdk.WithMaxQueueSize(queued),
			sdk.WithMaxExportBatchSize(batch), sdk.WithBatchTimeout(delay), sdk.WithExportTimeout(0))}))
	t.tracer = t.provider.Tracer("github.com/kvhost/kvhost", trace.WithInstrumentationVersion(t.version))
}

// put replaces the settings.
func (t *Tracer) put(next *settings) {
	if old := t.current.Swap(next); old != nil {
		old.replace()
		old.client.CloseIdleConnections()
	}
}

// Close sends what is queued, for a second at most. Nothing is exported after it.
func (t *Tracer) Close() {
	t.mu.Lock()
	t.closed = true
	provider := t.provider
	t.mu.Unlock()
	if provider != nil {
		timer := time.AfterFunc(closes, t.stop)
		_ = provider.Shutdown(context.Background()) // the exporter has counted and logged what was lost
		timer.Stop()
	}
	t.stop()
	t.put(nil)
}

// Stats count spans. Dropped ones found no room; failed ones were refused by the collector, or not taken in time.
type Stats struct {
	Exported, Dropped, Failed uint64
	Waiting                   int
}

// Stats reads the counters.
func (t *Tracer) Stats() Stats {
	return Stats{t.exported.Load(), t.dropped.Load(), t.failed.Load(), int(t.waiting.Load())}
}

// settings are a Config that spans are sent by until the next.
type settings struct {
	Config
	exporter sdk.SpanExporter
	client   *http.Client
	replaced context.Context // done when other settings are in force
	replace  context.CancelFunc
}
