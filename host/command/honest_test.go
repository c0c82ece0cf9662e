package command

import (
	"context"
	"slices"

	"github.com/kvhost/kvhost/host/internal/replay"
)

// honestSessions are sessions that come to a host one after the other and replay the first requests of a trace. Every byte that
// they load is compared. Chunks have a size of their own in each of 32 sessions, so that each finds some to store.
type honestSessions struct {
	socket string

	sessions                          int
	keys, hits, stored, lost, refused int64
	compared, wrong                   int64
	times                             [3][]float64 // 99th percentiles in ms of lookups, loads and stores, by session
}

// honestOps are what is measured, in the order of honestSessions.times.
var honestOps = []string{"lookup", "load", "store"}

// session is one session. What the host refuses or fails to do is counted; an error ends the session early.
func (h *honestSessions) session(ctx context.Context) error {
	size := int64(4+h.sessions%32) * 1024
	report, err := replay.Run(ctx, replay.Options{
		Trace: mixedTrace, Socket: h.socket, Limit: 12, Memory: 4 << 20,
		Shape: replay.Shape{Ranks: 2, ChunkBytes: size, PageBytes: size},
	})
	if err != nil {
		return err
	}
	h.sessions++
	h.keys, h.hits = h.keys+report.Accesses, h.hits+report.Hits
	h.compared, h.wrong = h.compared+report.BytesLoaded, h.wrong+report.MismatchedBytes
	h.stored, h.lost = h.stored+report.Stored, h.lost+report.FailedLoads
	h.refused += report.Refused + report.Shed + report.FailedStores
	for i, l := range []replay.Latency{report.Lookup, report.Load, report.Store} {
		if l.Count > 0 {
			h.times[i] = append(h.times[i], l.P99)
		}
	}
	return nil
}

// share is that of hits.
func (h *honestSessions) share() float64 { return float64(h.hits) / float64(max(1, h.keys)) }

// p99 is the median of the sessions' 99th percentiles, in ms.
func (h *honestSessions) p99(op int) float64 {
	list := slices.Sorted(slices.Values(h.times[op]))
	if len(list) == 0 {
		return 0
	}
	return list[len(list)/2]
}
