package host

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/spans"
)

func (h *Host) openSpans(ctx context.Context) error {
	c, err := spansConfig(ctx, h.cfg, h.log)
	if err != nil {
		return err
	}
	if h.spans, err = spans.New(h.made.Version, c, h.log); err != nil {
		return fmt.Errorf("otlp: %w", err)
	}
	if c.Endpoint != "" {
		h.log.Info("spans are exported", "endpoint", c.Endpoint, "ratio", c.Ratio, "headers", h.cfg.OTLP.HeadersFile)
	}
	levels := map[string]int{}
	for _, r := range h.cfg.Roots {
		levels[r.Path] = r.Level
	}
	h.traced = &server.RequestSpans{Tracer: h.spans, Levels: levels}
	return nil
}

// exportTimeout is how long a collector may take for one export. No request waits for it.
const exportTimeout = 10 * time.Second

// spansConfig returns the configuration of the tracer.
func spansConfig(ctx context.Context, c *config.Config, log *slog.Logger) (out spans.Config, err error) {
	o := c.OTLP
	if o.Endpoint == "" {
		return out, nil
	}
	if out.Endpoint, err = spans.Endpoint(o.Endpoint); err != nil {
		return out, fmt.Errorf("otlp.endpoint: %w", err)
	}
	out.Ratio, out.Timeout = o.SampleRatio, exportTimeout
	if o.HeadersFile == "" {
		return out, nil
	}
	headers, err := regular.Renew(func() (list map[string]string, err error) {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer stop()
		file, err := regular.ReadFile(ctx, o.HeadersFile, spans.MaxHeaders)
		if err == nil {
			list, err = spans.Headers(file)
		}
		if err != nil {
			err = fmt.Errorf("%w: otlp.headers_file: %s: %w", config.ErrFile, o.HeadersFile, err)
		}
		return list, err
	}, log, o.HeadersFile)
	out.Headers = headers.Now
	return out, err
}
