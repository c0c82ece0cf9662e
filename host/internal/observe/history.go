package observe

import (
	"bytes"
	"cmp"
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// The last five minutes of the page's graphs are kept here, because operators open the page after an incident.
const (
	sampleEvery = 2 * time.Second
	samplesKept = 150
)

// history holds readings of the status, reduced to the parts that the page draws over time.
type history struct {
	mu           sync.Mutex
	samples      [][]byte // JSON, the oldest first
	before, last *proto.StatusResponse
}

// run adds a reading at each tick until the context is done.
func (h *history) run(ctx context.Context, every time.Duration, status func() (answer, error)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if a, err := status(); err == nil {
			h.add(a.status)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (h *history) add(s *proto.StatusResponse) {
	kept := &proto.StatusResponse{Uptime: s.Uptime, Latencies: s.Latencies, Counters: map[string]uint64{}}
	for _, name := range []string{"lookups", "lookup_keys", "lookup_hits"} {
		kept.Counters[name] = s.Counters[name]
	}
	moved := map[proto.Direction]*proto.RouteStatus{}
	for _, r := range s.Routes {
		if moved[r.Direction] == nil {
			moved[r.Direction] = &proto.RouteStatus{Direction: r.Direction}
			kept.Routes = append(kept.Routes, moved[r.Direction])
		}
		moved[r.Direction].Bytes += r.Bytes
	}
	for _, p := range s.Policies {
		if p.Trial != nil {
			kept.Policies = append(kept.Policies, &proto.PolicyStatus{Name: p.Name, Trial: p.Trial})
		}
	}
	b, err := proto.JSON(kept)
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.before, h.last = h.last, s
	h.samples = append(h.samples, b)
	if len(h.samples) > samplesKept {
		h.samples = slices.Clone(h.samples[1:]) // the old array may still be in use for an answer
	}
}

// earlier returns the reading to which rates of now refer. If there is none, it returns now.
func (h *history) earlier(now *proto.StatusResponse) *proto.StatusResponse {
	h.mu.Lock()
	defer h.mu.Unlock()
	return cmp.Or(h.before, now)
}

// ServeHTTP answers with an array of readings.
func (h *history) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	samples := h.samples
	h.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	body := append([]byte{'['}, bytes.Join(samples, []byte{','})...)
	_, _ = w.Write(append(body, ']', '\n')) // an error means that the client is gone
}
