package server

import (
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"google.golang.org/protobuf/types/known/durationpb"
)

// lookupHits holds the result of a LOOKUP.
type lookupHits struct {
	Lease   *store.Lease
	Readers uint64          // local ranks that will load the hits, as bits
	Bytes   int64           // bytes of one rank's pages of a chunk
	Own     *transfer.Queue // queue of the session that asks; it stands for ranks that have registered no memory
}

// lookupAnswer is the answer to a LOOKUP together with its parts, so that one allocation holds all of them.
type lookupAnswer struct {
	Message proto.SessionResponse
	Reply   proto.LookupReply
	body    proto.SessionResponse_Lookup
	level   [1]proto.LevelHits // room for one level: most answers need no more
	levels  [1]*proto.LevelHits
	times   [2]durationpb.Duration // load times of all hits and of the hits in level
}

// newLookupAnswer returns an empty answer to the message with this id.
func newLookupAnswer(id uint64) *lookupAnswer {
	a := &lookupAnswer{}
	a.body.Lookup = &a.Reply
	a.Message.Id, a.Message.Body = id, &a.body
	a.levels[0] = &a.level[0]
	a.Reply.Levels = a.levels[:0]
	return a
}

// Fill adds the levels of the hits and the expected load times. A load time is 0 if it has not been measured yet.
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

// lookupInHand is a LOOKUP that has been looked up and not yet answered.
type lookupInHand struct {
	message *proto.SessionRequest
	since   time.Time
	span    requestSpan
	group   *kv.Group
	lease   *sharedLease // nil if the LOOKUP needs no key
}

// answerLookup grants the lease and sends the answer.
func (x *session) answerLookup(a lookupInHand) error {
	reply, m, asked := newLookupAnswer(a.message.Id), a.message.GetLookup(), 0
	if a.lease != nil {
		asked = a.lease.keys - a.lease.first
		if err := x.answer(reply, a.group, a.lease); err != nil {
			return err
		}
	}
	x.reply(&reply.Message)
	x.server.latencies.Observe(AnswerLookup, a.since)
	profile := x.profile.Load()
	if !m.GetPin() {
		profile.usage.Keys.Add(uint64(asked))
		profile.usage.Hits.Add(uint64(reply.Reply.Hits))
	}
	a.span.Lookup(profile.spans, m, asked, &reply.Reply)
	return nil
}

// answer fills the reply and grants the lease, or releases its pins.
func (x *session) answer(answer *lookupAnswer, g *kv.Group, l *sharedLease) error {
	hits, reply := l.pins.Hits(), &answer.Reply
	reply.Hits = uint32(hits)
	if g.Lookup == kv.ByMembership {
		reply.Bits = make([]byte, (l.keys+7)/8)
		for i := l.first; i < l.keys; i++ {
			if l.pins.Has(i - l.first) {
				reply.Bits[i/8] |= 1 << (i % 8)
			}
		}
	}
	if hits == 0 {
		l.pins.Release()
		return nil
	}
	answer.Fill(lookupHits{
		Lease: l.pins, Readers: l.readers, Bytes: g.Geometry.PageBytes() * int64(x.units), Own: x.queue,
	}, x.engine)
	x.server.hold(l)
	var err error
	if reply.Lease, err = x.engine.grant(l); err != nil {
		l.pins.Release()
		x.share.Give(budget.Entries, l.bytes)
	}
	return err
}

// setDuration sets a duration in place, where durationpb.New would allocate.
func setDuration(m *durationpb.Duration, d time.Duration) *durationpb.Duration {
	m.Seconds, m.Nanos = int64(d/time.Second), int32(d%time.Second)
	return m
}

// longest returns the time that the slowest reader needs to load from some places. It is 0 if the time of any reader is
// unknown.
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

// grow returns n empty entries for the levels of the answer.
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
