package server

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// lookupHits are what a LOOKUP has found.
type lookupHits struct {
	Lease   *store.Lease
	Keys    int             // of the lease
	Readers uint64          // local ranks that will load
	Bytes   int64           // of the pages of a chunk
	Own     *transfer.Queue // of the session that asks, for ranks that have registered no memory
}

// lookupAnswer is the answer to a LOOKUP, in one piece.
type lookupAnswer struct {
	Message proto.SessionResponse
	Reply   proto.LookupReply
	body    proto.SessionResponse_Lookup
	level   [1]proto.LevelHits // most hits are in one level
	levels  [1]*proto.LevelHits
	times   [2]durationpb.Duration // of all hits, and of those in level
}

// newLookupAnswer makes an answer to a message.
func newLookupAnswer(id uint64) *lookupAnswer {
	a := &lookupAnswer{}
	a.body.Lookup = &a.Reply
	a.Message.Id, a.Message.Body = id, &a.body
	a.levels[0] = &a.level[0]
	a.Reply.Levels = a.levels[:0]
	return a
}

// Fill fills in where the hits are, and how long loads of them take: 0 where that was not measured yet.
func (a *lookupAnswer) Fill(h lookupHits, e *servingEngine) {
	e.mu.Lock()
	queues := e.queues
	e.mu.Unlock()
	a.Reply.Bytes = uint64(h.Lease.Hits()) * uint64(h.Bytes)
	var parts []transfer.LoadPart
	took := h.longest(&queues, func(q *transfer.Queue, longest time.Duration) time.Duration {
		took, split := q.LoadTime(h.Lease, h.Keys, h.Bytes, nil)
		if took > longest {
			parts = split
		}
		return took
	})
	if took > 0 {
		a.Reply.LoadTime = setDuration(&a.times[0], took)
		for _, part := range parts {
			a.Reply.LoadParts = append(a.Reply.LoadParts,
				&proto.LoadPart{Keys: uint32(part.Keys), LoadTime: durationpb.New(part.Time)})
		}
	}
	var found [store.MaxLevels]store.LevelHits
	list := h.Lease.Found(found[:0])
	for i, r := range a.grow(len(list)) {
		in := list[i]
		if len(list) > 1 {
			took = h.longest(&queues, func(q *transfer.Queue, _ time.Duration) time.Duration {
				return q.LevelTime(h.Lease, in, h.Bytes)
			})
		}
		r.Level, r.Chunks = uint32(in.Level), uint32(in.Hits)
		r.Bytes = uint64(in.Hits) * uint64(h.Bytes)
		switch {
		case took > 0 && len(list) == 1:
			r.LoadTime = setDuration(&a.times[1], took)
		case took > 0:
			r.LoadTime = durationpb.New(took)
		}
	}
}

// setDuration sets a duration that is a part of a larger allocation.
func setDuration(m *durationpb.Duration, d time.Duration) *durationpb.Duration {
	m.Seconds, m.Nanos = int64(d/time.Second), int32(d%time.Second)
	return m
}

// longest is the longest time among the readers' queues, 0 where one of them is not known.
func (h *lookupHits) longest(
	queues *[kv.MaxRanks]*transfer.Queue, of func(q *transfer.Queue, longest time.Duration) time.Duration,
) (longest time.Duration) {
	for rank, q := range queues {
		if h.Readers>>rank&1 == 0 {
			continue
		}
		if q == nil {
			q = h.Own
		}
		took := of(q, longest)
		if took == 0 {
			return 0
		}
		longest = max(longest, took)
	}
	return longest
}

// grow makes room for the hits of so many levels.
func (a *lookupAnswer) grow(n int) []*proto.LevelHits {
	if n <= len(a.levels) {
		a.Reply.Levels = a.levels[:n]
		return a.Reply.Levels
	}
	all := make([]proto.LevelHits, n)
	a.Reply.Levels = make([]*proto.LevelHits, n)
	for i := range all {
		a.Reply.Levels[i] = &all[i]
	}
	return a.Reply.Levels
}
