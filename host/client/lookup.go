package client

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// LookupRequest asks for keys of a group.
type LookupRequest struct {
	Request uint32 // the engine's number; 0: none
	Group   uint32
	Keys    []kv.Key
	First   uint32 // keys before it are not needed
	Readers uint64 // bit i: the engine's i-th local rank will load under the lease; 0: this session's rank
	// Prefetch says that the load will come later: hits of farther levels are copied to the nearest one, as long as
	// the lease lasts. It has no effect on a host with one level (Host.Levels).
	Prefetch bool
	// Pin says that no load follows: the lease keeps what is found, in at most half of a root (Host.PinBytes).
	Pin bool
}

// LevelHits are the hits of which a level has the nearest copy.
type LevelHits struct {
	Level    int // 0 is the nearest
	Chunks   int
	Bytes    int64         // that one reader's load of them delivers
	LoadTime time.Duration // of the readers' loads of them alone, as Lookup.LoadTime
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
	// LoadTime is the host's estimate of how long the readers' loads of all hits take if they start now, at its measured
	// bandwidth and with its queue. 0: it has measured nothing yet.
	LoadTime time.Duration
	levels   []*proto.LevelHits
}

// Lookup asks what can be loaded. If the context ends first, a granted lease is left to expire.
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

// Leased names the lease of a lookup that another session of the same engine made, for Load. It has no hits of its
// own.
func (s *Session) Leased(group uint32, lease uint64) *Lookup {
	return &Lookup{session: s, group: group, lease: lease}
}

// Hits is the number of keys that may be loaded; in a prefix group they are the run from First.
func (l *Lookup) Hits() int { return l.hits }

// Has reports whether key i of the request may be loaded.
func (l *Lookup) Has(i int) bool {
	if l.bits == nil {
		return i >= l.first && i < l.first+l.hits
	}
	return i >= 0 && i/8 < len(l.bits) && l.bits[i/8]>>(i%8)&1 == 1
}

// Levels are where the hits were found, nearest first.
func (l *Lookup) Levels() []LevelHits {
	list := make([]LevelHits, len(l.levels))
	for i, in := range l.levels {
		list[i] = LevelHits{int(in.GetLevel()), int(in.GetChunks()), int64(in.GetBytes()), in.GetLoadTime().AsDuration()}
	}
	return list
}

// Lease is the lease's number, 0 without hits.
func (l *Lookup) Lease() uint64 { return l.lease }

// Release ends the lease. It has no effect on a lease that is over.
func (l *Lookup) Release(ctx context.Context) error {
	if l.lease == 0 {
		return nil
	}
	_, err := l.session.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Release{Release: &proto.Release{Lease: l.lease}}})
	return err
}
