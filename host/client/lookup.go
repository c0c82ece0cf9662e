package client

import (
	"context"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
)

// LookupRequest asks for keys of a group.
type LookupRequest struct {
	Request uint32 // the engine's number, 0 for none
	Group   uint32
	Keys    []chunk.Key
	First   uint32 // keys before it are not needed
	Readers uint64 // bit i: the engine's i-th local rank will load under the lease; 0: this session's rank
}

// Lookup is the answer: what is there, and the lease that keeps it there for a while.
type Lookup struct {
	session *Session
	group   uint32
	lease   uint64
	first   int
	hits    int
	bits    []byte
}

// Lookup asks what can be loaded. A context that ends leaves the lease, if one was granted, to expire.
func (s *Session) Lookup(ctx context.Context, q LookupRequest) (*Lookup, error) {
	n := s.hello.Namespace.KeyBytes
	m := &proto.Lookup{
		Request: q.Request, Group: q.Group, First: q.First, Readers: q.Readers,
		Keys: proto.AppendKeys(make([]byte, 0, n*len(q.Keys)), q.Keys, n),
	}
	r, err := s.ask(ctx, &proto.ClientMessage{Body: &proto.ClientMessage_Lookup{Lookup: m}})
	if err != nil {
		return nil, err
	}
	a := r.GetLookup()
	return &Lookup{session: s, group: q.Group, lease: a.GetLease(), first: int(q.First), hits: int(a.GetHits()),
		bits: a.GetBits()}, nil
}

// Leased is a lookup that another session of the same engine made, by its lease, for Load. Its hits are not known here.
func (s *Session) Leased(group uint32, lease uint64) *Lookup {
	return &Lookup{session: s, group: group, lease: lease}
}

// Hits is the number of keys that may be loaded: of a prefix group, the run from First on.
func (l *Lookup) Hits() int { return l.hits }

// Has says whether key i of the request may be loaded.
func (l *Lookup) Has(i int) bool {
	if l.bits == nil {
		return i >= l.first && i < l.first+l.hits
	}
	return i >= 0 && i/8 < len(l.bits) && l.bits[i/8]>>(i%8)&1 == 1
}

// Bits are a membership group's hits, bit i%8 of byte i/8 for key i; nil for a prefix group.
func (l *Lookup) Bits() []byte { return l.bits }

// Lease is the lease's number, 0 when nothing was hit.
func (l *Lookup) Lease() uint64 { return l.lease }

// Release ends the lease. Calling it again, or after a load or the expiry, does no harm.
func (l *Lookup) Release(ctx context.Context) error {
	if l.lease == 0 {
		return nil
	}
	_, err := l.session.ask(ctx,
		&proto.ClientMessage{Body: &proto.ClientMessage_Release{Release: &proto.Release{Lease: l.lease}}})
	return err
}
