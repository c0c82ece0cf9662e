package host

import (
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/spans"
)

func (h *Host) openSpans(ctx context.Context) (*server.RequestSpans, error) {
	c, err := spansConfig(ctx, h.cfg)
	if err != nil {
		return nil, err
	}
	if h.spans, err = spans.New(h.version, c, h.log); err != nil {
		return nil, fmt.Errorf("otlp: %w", err)
	}
	if c.Endpoint != "" {
		h.log.Info("spans are exported", "endpoint", c.Endpoint, "ratio", c.Ratio, "headers", len(c.Headers), "timeout", c.Timeout)
	}
	levels := map[string]int{}
	for _, r := range h.cfg.Roots {
		levels[r.Path] = r.Level
	}
	return &server.RequestSpans{Tracer: h.spans, Levels: levels}, nil
}

// spansConfig is a configuration in the form of the tracer.
func spansConfig(ctx context.Context, c *config.Config) (out spans.Config, err error) {
	o := c.OTLP
	if o.Endpoint == "" {
		return out, nil
	}
	if out.Endpoint, err = spans.Endpoint(o.Endpoint); err != nil {
		return out, fmt.Errorf("otlp.endpoint: %w", err)
	}
	out.Ratio, out.Timeout = o.SampleRatio, o.Timeout
	if o.HeadersFile == "" {
		return out, nil
	}
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	file, err := regular.ReadFile(ctx, o.HeadersFile, spans.MaxHeaders)
	if err == nil {
		out.Headers, err = spans.Headers(file)
	}
	if err != nil {
		return out, fmt.Errorf("%w: otlp.headers_file: %s: %w", config.ErrFile, o.HeadersFile, err)
	}
	return out, nil
}
