package spans

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// queue wraps the SDK's queue. The SDK drops a span that finds no room without counting it, so this queue passes on only spans
// that fit.
type queue struct {
	of *Tracer
	sdk.SpanProcessor
}

func (q *queue) OnEnd(s sdk.ReadOnlySpan) {
	if q.of.waiting.Add(1) > queued {
		q.of.waiting.Add(-1)
		q.of.dropped.Add(1)
		return
	}
	q.SpanProcessor.OnEnd(s)
}

// retries configures the repetitions for one batch.
var retries = otlptracehttp.RetryConfig{
	Enabled: true, InitialInterval: time.Second, MaxInterval: 30 * time.Second, MaxElapsedTime: time.Minute,
}

// longestAnswer is the maximum number of bytes that are read of a collector's answer.
const longestAnswer = 64 << 10

// newExporter returns an exporter of the SDK. It overrides all settings that the SDK would read from the environment.
func newExporter(c Config, client *http.Client) (sdk.SpanExporter, error) {
	return otlptracehttp.New(context.Background(), otlptracehttp.WithEndpointURL(c.Endpoint), otlptracehttp.WithHeaders(map[string]string{}),
		otlptracehttp.WithCompression(otlptracehttp.NoCompression), otlptracehttp.WithEncoding(otlptracehttp.EncodingProtobuf),
		otlptracehttp.WithTLSClientConfig(nil), otlptracehttp.WithTimeout(c.Timeout), otlptracehttp.WithRetry(retries),
		otlptracehttp.WithMaxResponseSize(longestAnswer), otlptracehttp.WithHTTPClient(client))
}

// exporter sends batches and counts the results. The SDK calls it from one goroutine.
type exporter struct {
	of   *Tracer
	to   sdk.SpanExporter
	well bool // the last batch was accepted
}

// ExportSpans sends a batch until the collector accepts or refuses it, or until the retries are used up.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	t := e.of
	t.waiting.Add(-int64(len(spans)))
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(t.limit, stop)()
	err := e.to.ExportSpans(ctx, spans)
	lost := rejected(err, len(spans))
	t.failed.Add(uint64(lost))
	t.exported.Add(uint64(len(spans) - lost))
	switch {
	case lost > 0 && e.well:
		text := err.Error()
		t.log.Warn("spans are lost", "error", valid(text[:min(len(text), longestText)]))
	case lost == 0 && !e.well:
		t.log.Info("spans are exported again")
	}
	e.well = lost == 0
	return nil // the SDK would write an error to its own log
}

func (e *exporter) Shutdown(ctx context.Context) error { return e.to.Shutdown(ctx) }

// partly matches the error with which the exporter reports that a collector has refused some spans of a batch. The error has no
// exported type.
var partly = regexp.MustCompile(`(?s)OTLP partial success: .*\((-?\d+) spans rejected\)`)

// rejected returns the number of spans of a batch that were lost by an error of the exporter. The number in the error may be
// wrong, because it comes from the collector.
func rejected(err error, of int) int {
	if err == nil {
		return 0
	}
	m := partly.FindStringSubmatch(err.Error())
	if m == nil {
		return of
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		return of
	}
	return max(0, min(n, of))
}

// newClient returns an HTTP client that follows no redirect, because a redirect could send the headers elsewhere.
func newClient(c Config) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxConnsPerHost = 1
	return &http.Client{
		Transport:     again{transport, c.Headers},
		Timeout:       c.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// again adds the current headers. It also marks network failures as temporary, so that the exporter tries again: a collector that restarts
// refuses connections for a while.
type again struct {
	http.RoundTripper
	headers func() map[string]string
}

type temporary struct{ error }

func (temporary) Temporary() bool { return true }
func (t temporary) Unwrap() error { return t.error }

func (a again) RoundTrip(q *http.Request) (*http.Response, error) {
	if a.headers != nil {
		q = q.Clone(q.Context())
		for name, value := range a.headers() {
			q.Header.Set(name, value)
		}
	}
	r, err := a.RoundTripper.RoundTrip(q)
	if err != nil && q.Context().Err() == nil {
		err = temporary{err}
	}
	return r, err
}

// CloseIdleConnections supports [http.Client.CloseIdleConnections].
func (a again) CloseIdleConnections() {
	if c, ok := a.RoundTripper.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}
