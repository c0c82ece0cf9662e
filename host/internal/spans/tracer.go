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

// Config determines which requests get spans, and where the spans are sent.
type Config struct {
	Endpoint string                   // URL of a collector: see [Endpoint]; empty turns spans off
	Headers  func() map[string]string // returns the current headers of an export; nil means none
	Ratio    float64                  // sampled part of the requests without a parent from the client
	Timeout  time.Duration            // limit of one attempt to export
}

// Limits of the spans that wait for the collector. They take about 3 MiB.
const (
	queued = 2048
	batch  = 512
	delay  = time.Second // longest time that a span waits for others in its batch
	closes = time.Second // time to send the rest when the tracer closes
)

// longestText is the maximum number of characters of an attribute's text.
const longestText = 512

// Tracer begins spans and sends those that end. A nil Tracer begins none.
type Tracer struct {
	log   *slog.Logger
	ratio float64
	off   atomic.Bool

	client   *http.Client
	tracer   trace.Tracer
	provider *sdk.TracerProvider // nil if spans are off; its goroutine ends in Close
	limit    context.Context     // context of all exports
	stop     context.CancelFunc

	waiting                   atomic.Int64 // spans in the queue that the exporter has not taken yet
	exported, dropped, failed atomic.Uint64
}

// New returns a tracer, which is off without an endpoint. Its spans name this host, unless OTEL_SERVICE_NAME and
// OTEL_RESOURCE_ATTRIBUTES in the environment say otherwise. Nothing is sent before the first span has ended.
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
	t.provider = sdk.NewTracerProvider(sdk.WithResource(host), sdk.WithSampler(sdk.AlwaysSample()), // Begin makes the decision
		sdk.WithRawSpanLimits(sdk.SpanLimits{AttributeValueLengthLimit: longestText, AttributeCountLimit: -1, EventCountLimit: -1,
			LinkCountLimit: -1, AttributePerEventCountLimit: -1, AttributePerLinkCountLimit: -1}),
		sdk.WithSpanProcessor(&queue{t, sdk.NewBatchSpanProcessor(&exporter{of: t, to: to, well: true}, sdk.WithMaxQueueSize(queued),
			sdk.WithMaxExportBatchSize(batch), sdk.WithBatchTimeout(delay), sdk.WithExportTimeout(0))}))
	t.tracer = t.provider.Tracer("github.com/kvhost/kvhost", trace.WithInstrumentationVersion(version))
	return t, nil
}

// Close sends the queued spans, within one second. No span begins afterwards.
func (t *Tracer) Close() {
	if t.provider == nil || t.off.Swap(true) {
		return
	}
	timer := time.AfterFunc(closes, t.stop)
	_ = t.provider.Shutdown(context.Background()) // the exporter has counted and logged lost spans
	timer.Stop()
	t.stop()
	t.client.CloseIdleConnections()
}

// Stats count spans. Dropped spans found no room. Failed spans were refused by the collector, or not accepted in time.
type Stats struct {
	Exported, Dropped, Failed uint64
	Waiting                   int
}

func (t *Tracer) Stats() Stats {
	return Stats{t.exported.Load(), t.dropped.Load(), t.failed.Load(), int(t.waiting.Load())}
}
