package client

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// LookupRequest asks for keys of a group.
type LookupRequest struct {
	Request uint32 // the engine's number of the request; 0 means none
	Group   uint32
	Keys    []kv.Key
	First   uint32 // index of the first needed key
	Readers uint64 // local ranks of the engine that will load under the lease, as bits; 0 means this session's rank
	// Prefetch means that the load will come later. Hits in farther levels are copied to the nearest level while the
	// lease lasts. It has no effect on a host with one level (Host.Levels).
	Prefetch bool
	// Pin means that no load follows. The lease only keeps the found entries resident, in at most half of a root
	// (Host.PinBytes).
	Pin bool
}

// LevelHits describes the hits with their nearest copy in one level.
type LevelHits struct {
	Level    int // 0 is the nearest
	Chunks   int
	Bytes    int64         // bytes that one reader's load of these hits delivers
	LoadTime time.Duration // estimated time of the readers' loads of these hits alone: see Lookup.LoadTime
}

// Lookup is the answer to a lookup: its hits, and the lease that pins them.
type Lookup struct {
	session *Session
	group   uint32
	lease   uint64
	first   int
	hits    int
	bits    []byte

	// Bytes is the size of the pages that one reader's load of all hits delivers.
	Bytes int64
	// LoadTime is the host's estimate of the time in which all readers have loaded all hits if they start now. It is based on
	// the measured bandwidth and the present queue. 0 means that nothing has been measured yet.
	LoadTime time.Duration
	levels   []*proto.LevelHits
}

// Lookup asks which keys can be loaded. If the context ends first, a granted lease expires later.
func (s *Session) Lookup(ctx context.Context, q LookupRequest) (*Lookup, error) {
	m := &proto.Lookup{
		Request: q.Request, Group: q.Group, First: q.First, Readers: q.Readers, Prefetch: q.Prefetch, Pin: q.Pin,
		Keys: proto.PackKeys(q.Keys, s.hello.Namespace.KeyBytes),
	}
	r, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: m}})
	if err != nil {
		return nil, err
	}
	a := r.GetLookup()
	return &Lookup{session: s, group: q.Group, lease: a.GetLease(), first: int(q.First), hits: int(a.GetHits()),
		bits: a.GetBits(), Bytes: int64(a.GetBytes()), LoadTime: a.GetLoadTime().AsDuration(),
		levels: a.GetLevels()}, nil
}

// Leased refers to the lease of a lookup that another session of the same engine made. It can be passed to Load. It has
// no hits of its own.
func (s *Session) Leased(group uint32, lease uint64) *Lookup {
	return &Lookup{session: s, group: group, lease: lease}
}

// Hits returns the number of keys that may be loaded. In a prefix group these are consecutive keys from First.
func (l *Lookup) Hits() int { return l.hits }

// Has reports whether key i of the request may be loaded.
func (l *Lookup) Has(i int) bool {
	if l.bits == nil {
		return i >= l.first && i < l.first+l.hits
	}
	return i >= 0 && i/8 < len(l.bits) && l.bits[i/8]>>(i%8)&1 == 1
}

// Levels returns the levels of the hits, nearest first.
func (l *Lookup) Levels() []LevelHits {
	list := make([]LevelHits, len(l.levels))
	for i, in := range l.levels {
		list[i] = LevelHits{int(in.GetLevel()), int(in.GetChunks()), int64(in.GetBytes()), in.GetLoadTime().AsDuration()}
	}
	return list
}

// Lease returns the number of the lease. It is 0 without hits.
func (l *Lookup) Lease() uint64 { return l.lease }

// Release ends the lease. It has no effect on a lease that is over.
func (l *Lookup) Release(ctx context.Context) error {
	if l.lease == 0 {
		return nil
	}
	_, err := l.session.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Release{Release: &proto.Release{Lease: l.lease}}})
	return err
}
