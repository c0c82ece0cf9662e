package spans

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// How long a batch that the collector does not take is tried again.
const (
	attempts   = 5
	firstPause = time.Second // doubled for each further attempt
	longPause  = 30 * time.Second
)

// export is the tracer's goroutine. It ends with ctx, after what is queued then.
func (t *Tracer) export(ctx context.Context) {
	defer close(t.stopped)
	limit, stop := context.WithCancel(context.Background())
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(closes, stop) })()
	well := true
	for last := false; !last; {
		var spans [][]byte
		spans, last = t.collect(ctx)
		rejected, err := t.deliver(ctx, limit, spans)
		rejected = min(rejected, len(spans)) // a collector may say anything
		switch {
		case err != nil:
			t.failed.Add(uint64(len(spans)))
			if well {
				t.log.Warn("spans are lost", "error", err)
			}
		default:
			t.failed.Add(uint64(rejected))
			t.exported.Add(uint64(len(spans) - rejected))
			if !well {
				t.log.Info("spans are exported again")
			}
		}
		well = err == nil
	}
}

// collect waits for spans: for the first as long as ctx lasts, for a batch of them a moment. After the end it takes what is
// queued, the last.
func (t *Tracer) collect(ctx context.Context) (spans [][]byte, last bool) {
	var more <-chan time.Time
	for len(spans) < batch {
		select {
		case s := <-t.queue:
			if spans = append(spans, s); more == nil {
				timer := time.NewTimer(delay)
				defer timer.Stop()
				more = timer.C
			}
		case <-more:
			return spans, false
		case <-ctx.Done():
			for {
				select {
				case s := <-t.queue:
					spans = append(spans, s)
				default:
					return spans, true
				}
			}
		}
	}
	return spans, false
}

// deliver sends spans until the collector takes or refuses them, spans are switched off, or it was tried often enough. Other
// settings begin anew. After the end of ctx it tries once more, until limit is done.
func (t *Tracer) deliver(ctx, limit context.Context, spans [][]byte) (rejected int, err error) {
	if len(spans) == 0 {
		return 0, nil
	}
	body := data(t.resource, t.version, spans)
	var with *settings
	for n := 0; n < attempts; n++ {
		now := t.current.Load()
		if now == nil {
			return len(spans), nil // off since they were made
		}
		if now != with {
			with, n = now, 0
		}
		var pause time.Duration
		if rejected, pause, err = with.post(limit, body); err == nil || pause < 0 || ctx.Err() != nil {
			return rejected, err
		}
		timer := time.NewTimer(min(max(pause, firstPause<<n), longPause))
		select {
		case <-timer.C:
		case <-with.replaced.Done():
		case <-ctx.Done():
			n = attempts - 2 // once more
		}
		timer.Stop()
	}
	return 0, err
}

// post sends a batch once. pause is how long to wait before the next attempt at least; below 0: there is to be none.
func (c *settings) post(ctx context.Context, body []byte) (rejected int, pause time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	defer context.AfterFunc(c.replaced, cancel)()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, c.Endpoint, bytes.NewReader(body))
	if err != nil {
		return 0, -1, err
	}
	for name, values := range c.Headers {
		q.Header[name] = values
	}
	q.Header.Set("Content-Type", "application/x-protobuf")
	q.Header.Set("User-Agent", "kvhost")
	r, err := c.client.Do(q)
	if err != nil {
		return 0, 0, fmt.Errorf("%w: %w", errCollector, err)
	}
	defer r.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(r.Body, 64<<10))
	switch {
	case r.StatusCode >= 200 && r.StatusCode < 300:
		return rejectedOf(answer), 0, nil // it has taken them, whatever became of its answer
	case r.StatusCode == http.StatusTooManyRequests, r.StatusCode == http.StatusBadGateway,
		r.StatusCode == http.StatusServiceUnavailable, r.StatusCode == http.StatusGatewayTimeout:
		pause = retryAfter(r.Header.Get("Retry-After"))
	default:
		pause = -1
	}
	return 0, pause, errors.Join(fmt.Errorf("%w: %s answers %s", errCollector, c.Endpoint, r.Status), err)
}

// retryAfter reads the seconds of a Retry-After.
func retryAfter(text string) time.Duration {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0
	}
	return time.Duration(n) * time.Second
}

// rejectedOf reads how many spans an ExportTraceServiceResponse says were refused: rejected_spans of partial_success. A
// response that is none says nothing.
func rejectedOf(answer []byte) int {
	var n uint64
	field := func(b []byte, want protowire.Number, take func([]byte, uint64)) {
		for len(b) > 0 {
			f, kind, size := protowire.ConsumeTag(b)
			if size < 0 {
				return
			}
			b = b[size:]
			if size = protowire.ConsumeFieldValue(f, kind, b); size < 0 {
				return
			}
			switch {
			case f != want:
			case kind == protowire.BytesType:
				v, _ := protowire.ConsumeBytes(b)
				take(v, 0)
			case kind == protowire.VarintType:
				v, _ := protowire.ConsumeVarint(b)
				take(nil, v)
			}
			b = b[size:]
		}
	}
	field(answer, 1, func(partial []byte, _ uint64) { field(partial, 1, func(_ []byte, v uint64) { n = v }) })
	return int(min(n, math.MaxInt32))
}

// newClient follows no redirect, which could take the headers elsewhere.
func newClient() *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxConnsPerHost = 1
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
