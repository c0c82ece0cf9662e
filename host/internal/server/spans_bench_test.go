package server

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
)

// BenchmarkLookupSpans is a lookup of ten keys through the socket: without spans, with spans switched off, and with a collector that
// takes a part of them or all.
func BenchmarkLookupSpans(b *testing.B) {
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	defer collector.Close()
	for _, c := range []struct {
		name  string
		ratio float64
	}{{"none", -2}, {"off", -1}, {"ratio=0.01", 0.01}, {"ratio=1", 1}} {
		b.Run(c.name, func(b *testing.B) {
			var requests *RequestSpans
			if c.ratio > -2 {
				cfg := spans.Config{Endpoint: collector.URL, Ratio: c.ratio, Timeout: time.Minute}
				if c.ratio < 0 {
					cfg.Endpoint = ""
				}
				tracer, err := spans.New("test", cfg, slog.New(slog.DiscardHandler))
				if err != nil {
					b.Fatal(err)
				}
				defer tracer.Close()
				requests = &RequestSpans{Tracer: tracer}
			}
			p := newRig(b, func(s *Config, _ *store.Config) { s.Spans = requests }).dial(nil)
			q := client.LookupRequest{Keys: keys(10)}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := p.Lookup(b.Context(), q); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
