package server

import (
	"errors"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// mostScratch is the maximum number of keys for which a session keeps its scratch memory.
const mostScratch = 4 << 10

func (x *session) lookup(message *proto.SessionRequest) error {
	since, m, span := time.Now(), message.GetLookup(), x.server.cfg.Spans.Begin(message)
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
	if cap(keys) > mostScratch { // LOOKUPs of this size are rare, so the memory is not kept
		x.lookups.keys = nil
	}
	first := int(m.GetFirst())
	a := lookupInHand{message: message, since: since, span: span, group: group}
	if first < len(keys) {
		number, err := x.engine.number(x.granted, m.GetRequest())
		if err != nil {
			return err
		}
		q := store.LookupRequest{
			Namespace: x.engine.space, Group: group.ID, Keys: keys[first:], Ranks: x.engine.facts.pieces, Request: number,
			Tenant: x.tenant, Prefetch: m.GetPrefetch(), Pin: m.GetPin(),
		}
		l, err := x.server.store.Lookup(q)
		if err != nil {
			return err
		}
		a.lease = &sharedLease{
			owner: x.granted, request: m.GetRequest(), group: group.ID, keys: len(keys), first: first, pins: l,
			readers: readers, span: span.Span(),
		}
		if ask := x.server.cfg.Peers.Promise(&q, l, group.Lookup != kv.ByMembership, nil); ask != nil && x.askPeer(ask, q, a) {
			return nil
		}
	}
	return x.answerLookup(a)
}

// lookupKeys decodes the keys into the session's scratch memory. The store must not keep them.
func (x *session) lookupKeys(m *proto.Lookup) ([]kv.Key, error) {
	n := len(m.GetKeys()) / x.ns.KeyBytes
	if err := x.cfg.Limits.checkKeys(n); err != nil {
		return nil, err
	}
	if int64(m.GetFirst()) > int64(n) {
		return nil, invalid("first", "%d of %d keys", m.GetFirst(), n)
	}
	var err error
	if x.lookups.keys, err = proto.ParseKeys(x.lookups.keys[:0], m.GetKeys(), x.ns.KeyBytes); err != nil {
		return nil, invalid("keys", "%v", err)
	}
	return x.lookups.keys, nil
}

// readers returns the local ranks that may load, as bits. An empty mask stands for this session's rank.
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

// reader returns the bit of this session's local rank.
func (x *session) reader() uint64 { return 1 << (x.rank - x.engine.facts.firstRank) }

func (x *session) release(m *proto.Release) error {
	l, err := x.engine.peek(m.GetLease())
	switch {
	case err == nil:
		x.engine.endLease(l)
		return nil
	case errors.Is(err, errLeaseOver):
		return nil
	}
	return faultf(proto.Code_CODE_UNKNOWN, "lease", "%d was never granted", m.GetLease())
}
