package spans

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Config says which requests get spans, and where those go.
type Config struct {
	Endpoint string                   // URL of [Endpoint]; empty: nowhere, and no request gets one
	Headers  func() map[string]string // of an export at present; nil: none
	Ratio    float64                  // of the requests without a parent from the client
	Timeout  time.Duration            // of one attempt to export
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
	log   *slog.Logger
	ratio float64
	off   atomic.Bool

	client   *http.Client
	tracer   trace.Tracer
	provider *sdk.TracerProvider // nil: off. Its goroutine ends in Close
	limit    context.Context     // ends all exports
	stop     context.CancelFunc

	waiting                   atomic.Int64 // spans that the exporter has not taken from the queue
	exported, dropped, failed atomic.Uint64
}

// New makes a tracer, which is off without an endpoint. Its spans name this host; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
// of the environment go before that. Nothing is sent before the first span has ended.
func New(version string, c Config, log *slog.Logger) (*Tracer, error) {
	return newTracer(version, c, newClient(c), log)
}

func newTracer(version string, c Config, client *http.Client, log *slog.Logger) (*Tracer, error) {
	t := &Tracer{log: log, ratio: c.Ratio, client: client}
	if c.Endpoint == "" {
		t.off.Store(true)
		return t, nil
	}
	to, err := newExporter(c, client)
	if err != nil {
		return nil, err
	}
	name, _ := os.Hostname()
	host, err := resource.New(context.Background(), resource.WithAttributes(Text("service.name", "kvhost"), Text("service.version", version),
		Text("host.name", name)), resource.WithFromEnv())
	if err != nil {
		log.Warn("OTEL_RESOURCE_ATTRIBUTES cannot be read whole", "error", err)
	}
	t.limit, t.stop = context.WithCancel(context.Background())
	t.provider = sdk.NewTracerProvider(sdk.WithResource(host), sdk.WithSampler(sdk.AlwaysSample()), // Begin decides
		sdk.WithRawSpanLimits(sdk.SpanLimits{AttributeValueLengthLimit: longestText, AttributeCountLimit: -1, EventCountLimit: -1,
			LinkCountLimit: -1, AttributePerEventCountLimit: -1, AttributePerLinkCountLimit: -1}),
		sdk.WithSpanProcessor(&queue{t, sdk.NewBatchSpanProcessor(&exporter{of: t, to: to, well: true}, sdk.WithMaxQueueSize(queued),
			sdk.WithMaxExportBatchSize(batch), sdk.WithBatchTimeout(delay), sdk.WithExportTimeout(0))}))
	t.tracer = t.provider.Tracer("github.com/kvhost/kvhost", trace.WithInstrumentationVersion(version))
	return t, nil
}

// Close sends what is queued, for a second at most. No span begins after it.
func (t *Tracer) Close() {
	if t.provider == nil || t.off.Swap(true) {
		return
	}
	timer := time.AfterFunc(closes, t.stop)
	_ = t.provider.Shutdown(context.Background()) // the exporter has counted and logged what was lost
	timer.Stop()
	t.stop()
	t.client.CloseIdleConnections()
}

// Stats count spans. Dropped ones found no room; failed ones were refused by the collector, or not taken in time.
type Stats struct {
	Exported, Dropped, Failed uint64
	Waiting                   int
}

func (t *Tracer) Stats() Stats {
	return Stats{t.exported.Load(), t.dropped.Load(), t.failed.Load(), int(t.waiting.Load())}
}
