package server

import (
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
)

// lookup is LOOKUP.
func (x *session) lookup(id uint64, m *proto.Lookup) error {
	group, err := x.group(m.GetGroup())
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
	reply := &proto.LookupReply{}
	first := int(m.GetFirst())
	if first < len(keys) {
		number, err := x.engine.number(x, m.GetRequest())
		if err != nil {
			return err
		}
		p, err := x.engine.space.lookup(lookup{
			group: group.ID, keys: keys[first:], ranks: x.engine.facts.pieces, request: number, tenant: x.tenant,
		})
		if err != nil {
			return err
		}
		if err := x.answer(reply, p, group, m, len(keys), readers); err != nil {
			return err
		}
	}
	x.reply(&proto.HostMessage{Id: id, Body: &proto.HostMessage_Lookup{Lookup: reply}})
	return nil
}

// answer fills the reply and grants the lease. Pins without a lease are released here.
func (x *session) answer(reply *proto.LookupReply, p pins, g *chunk.Group, m *proto.Lookup, keys int, readers uint64) error {
	hits := p.Hits()
	reply.Hits = uint32(hits)
	first := int(m.GetFirst())
	if g.Lookup == chunk.ByMembership {
		reply.Bits = make([]byte, (keys+7)/8)
		for i := first; i < keys; i++ {
			if p.Has(i - first) {
				reply.Bits[i/8] |= 1 << (i % 8)
			}
		}
	}
	if hits == 0 {
		p.Release()
		return nil
	}
	var err error
	reply.Lease, err = x.engine.grant(&lease{
		owner: x, request: m.GetRequest(), group: g.ID, keys: keys, first: first, pins: p, readers: readers,
	})
	if err != nil {
		p.Release()
	}
	return err
}

// lookupKeys reads the keys into the session's scratch: the store does not keep them.
func (x *session) lookupKeys(m *proto.Lookup) ([]chunk.Key, error) {
	n := len(m.GetKeys()) / x.ns.KeyBytes
	if err := x.checkKeys(n); err != nil {
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

func (x *session) checkKeys(n int) error {
	if limit := x.server.cfg.Limits.KeysPerLookup; n > limit {
		return faultf(proto.Code_CODE_LIMIT, "keys", "%d, at most %d in one LOOKUP", n, limit)
	}
	return nil
}

// readers is who may load: local ranks as bits.
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

// reader is this session's local rank as a bit.
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
	return faultf(proto.Code_CODE_UNKNOWN, "lease", "%d was never given", m.GetLease())
}
