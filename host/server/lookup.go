package server

import (
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/server/activity"
	"github.com/kvhost/kvhost/host/store"
)

// lookupAnswer is the answer to a LOOKUP, in one piece.
type lookupAnswer struct {
	message proto.HostMessage
	body    proto.HostMessage_Lookup
	reply   proto.LookupReply
	level   [1]proto.LevelHits // most hits are in one level
	levels  [1]*proto.LevelHits
}

// lookup is LOOKUP.
func (x *session) lookup(id uint64, m *proto.Lookup) error {
	since := time.Now()
	group, err := groupOf(x.ns, m.GetGroup())
	if err != nil {
		return err
	}
	keys, err := x.lookupKeys(m)
	if err != nil {
		return err
	}
	readers, err := x.readers(m.GetReaders())
	if err != nil {
		return err
	}
	a := &lookupAnswer{}
	reply := &a.reply
	a.levels[0] = &a.level[0]
	reply.Levels = a.levels[:0]
	first := int(m.GetFirst())
	if first < len(keys) {
		number, err := x.engine.number(x, m.GetRequest())
		if err != nil {
			return err
		}
		l, err := x.server.store.Lookup(store.LookupRequest{
			Namespace: x.engine.space, Group: group.ID, Keys: keys[first:], Ranks: x.engine.facts.pieces, Request: number,
			Tenant: x.tenant, Prefetch: m.GetPrefetch(),
		})
		if err != nil {
			return err
		}
		if err := x.answer(reply, group, &sharedLease{
			owner: x, request: m.GetRequest(), group: group.ID, keys: len(keys), first: first, pins: l,
			readers: readers,
		}); err != nil {
			return err
		}
	}
	a.body.Lookup = reply
	a.message.Id, a.message.Body = id, &a.body
	x.reply(&a.message)
	x.server.latencies.Observe(activity.Lookup, since)
	x.profile.Load().LookedUp(len(keys)-min(first, len(keys)), int(reply.Hits))
	return nil
}

// answer fills the reply and grants the lease, or releases its pins.
func (x *session) answer(reply *proto.LookupReply, g *chunk.Group, l *sharedLease) error {
	hits := l.pins.Hits()
	reply.Hits = uint32(hits)
	if g.Lookup == chunk.ByMembership {
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
	reply.Bytes = uint64(hits) * uint64(g.Geometry.PageBytes())
	took, parts := x.engine.loadTime(l, g.Geometry.PageBytes(), x.queue)
	reply.LoadMicros = uint64(took.Microseconds())
	for _, part := range parts {
		reply.LoadParts = append(reply.LoadParts,
			&proto.LoadPart{Keys: uint32(part.Keys), Micros: uint64(part.Time.Microseconds())})
	}
	x.answerLevels(reply, l, g.Geometry.PageBytes())
	var err error
	if reply.Lease, err = x.engine.grant(l); err != nil {
		l.pins.Release()
	}
	return err
}

// answerLevels fills in where the hits are.
func (x *session) answerLevels(reply *proto.LookupReply, l *sharedLease, bytes int64) {
	var found [store.MaxLevels]store.LevelHits
	list := l.pins.Found(found[:0])
	if n := len(list); n <= cap(reply.Levels) {
		reply.Levels = reply.Levels[:n]
	} else {
		levels := make([]proto.LevelHits, n)
		reply.Levels = make([]*proto.LevelHits, n)
		for i := range levels {
			reply.Levels[i] = &levels[i]
		}
	}
	for i, in := range list {
		micros := reply.LoadMicros
		if len(list) > 1 {
			micros = uint64(x.engine.levelTime(l, in, bytes, x.queue).Microseconds())
		}
		r := reply.Levels[i]
		r.Level, r.Chunks, r.Bytes, r.Micros = uint32(in.Level), uint32(in.Hits), uint64(in.Hits)*uint64(bytes), micros
	}
}

// lookupKeys reads the keys into the session's scratch memory: the store does not keep them.
func (x *session) lookupKeys(m *proto.Lookup) ([]chunk.Key, error) {
	n := len(m.GetKeys()) / x.ns.KeyBytes
	if err := x.server.cfg.Limits.checkKeys(n); err != nil {
		return nil, err
	}
	if int64(m.GetFirst()) > int64(n) {
		return nil, invalid("first", "%d of %d keys", m.GetFirst(), n)
	}
	var err error
	if x.keys, err = proto.ParseKeys(x.keys[:0], m.GetKeys(), x.ns.KeyBytes); err != nil {
		return nil, invalid("keys", "%v", err)
	}
	return x.keys, nil
}

// readers returns the local ranks that may load, as bits.
func (x *session) readers(mask uint64) (uint64, error) {
	local := x.engine.facts.localRanks
	if local < 64 && mask>>local != 0 {
		return 0, invalid("readers", "%#x, the engine has %d local ranks", mask, local)
	}
	if mask == 0 {
		return x.reader(), nil
	}
	return mask, nil
}

// reader returns this session's local rank as a bit.
func (x *session) reader() uint64 { return 1 << (x.rank - x.engine.facts.firstRank) }

// release is RELEASE.
func (x *session) release(m *proto.Release) error {
	l, err := x.engine.peek(m.GetLease())
	switch err {
	case nil:
		x.engine.endLease(l)
		return nil
	case errLeaseOver:
		return nil
	}
	return faultf(proto.Code_CODE_UNKNOWN, "lease", "%d was never granted", m.GetLease())
}
