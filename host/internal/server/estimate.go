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
	var room [store.MaxLevels]store.Place
	places := h.Lease.Places(room[:0])
	took := h.longest(&queues, places)
	if took > 0 {
		a.Reply.LoadTime = setDuration(&a.times[0], took)
	}
	if took > 0 && len(places) > 1 {
		var room [store.MaxLevels]store.Place
		h.Lease.Leads(room[:0], func(keys int, places []store.Place) {
			a.Reply.LoadParts = append(a.Reply.LoadParts,
				&proto.LoadPart{Keys: uint32(keys), LoadTime: durationpb.New(h.longest(&queues, places))})
		})
	}
	var all [store.MaxLevels][]store.Place
	levels := all[:0]
	for from, to := 0, 1; from < len(places); to++ {
		if to == len(places) || places[to].Level != places[from].Level {
			levels, from = append(levels, places[from:to]), to
		}
	}
	for i, r := range a.grow(len(levels)) {
		for _, at := range levels[i] {
			r.Level, r.Chunks = uint32(at.Level), r.Chunks+uint32(at.Hits)
		}
		r.Bytes = uint64(r.Chunks) * uint64(h.Bytes)
		if len(levels) > 1 {
			took = h.longest(&queues, levels[i])
		}
		switch {
		case took > 0 && len(levels) == 1:
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

// longest is the longest time that a reader's queue takes to load from some places, 0 where that of one of them is not known.
func (h *lookupHits) longest(queues *[kv.MaxRanks]*transfer.Queue, places []store.Place) (longest time.Duration) {
	for rank, q := range queues {
		if h.Readers>>rank&1 == 0 {
			continue
		}
		if q == nil {
			q = h.Own
		}
		took := q.LoadTime(places, h.Bytes)
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
