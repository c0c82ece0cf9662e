package peers

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
)

// Hosts fill unevenly. When a host with a fast turnover evicts an entry that no other host has, it offers the entry once to the
// host with the slowest turnover. This is N-chance forwarding (Dahlin et al., Cooperative Caching, OSDI 1994) to a chosen host
// instead of a random one. The chosen peer fetches the entries that it wants, so an offer never overloads it.

const (
	offerTime = 5 * time.Second // deadline of an offer; the peer has half of it to answer
	mostTakes = 8               // offers that this host takes at once
)

// turnover returns the time in which this host replaces its content, in milliseconds, as announced to peers. It is 0 if this
// host takes no offers.
func (p *Peers) turnover() uint64 {
	if p.lending != nil {
		if t := p.store.Turnover(); t > 0 {
			return uint64(t.Milliseconds()) + 1
		}
	}
	return 0
}

// chooseTaker chooses the peer that gets the offers of entries evicted here.
func (p *Peers) chooseTaker(list []*peer) {
	own := p.turnover()
	if own == 0 {
		return
	}
	turnovers := make([]time.Duration, len(list))
	for i, x := range list {
		if x.is(Here) {
			turnovers[i] = time.Duration(x.turnover.Load())
		}
	}
	p.turn++
	var taker *peer
	if n := policy.Taker(turnoverOf(own), turnovers, p.turn); n >= 0 {
		taker = list[n]
	}
	p.taker.Store(taker)
}

// Copies implements [store.Lender].
func (p *Peers) Copies(fp uint64) int { return bits.OnesCount64(p.table.at(fp) & p.usable.Load()) }

// Takes implements [store.Lender].
func (p *Peers) Takes() bool { return p.taker.Load() != nil }

// Offer implements [store.Lender].
func (p *Peers) Offer(ctx context.Context, o *store.Offer) error {
	x := p.taker.Load()
	if x == nil {
		return moves.ErrRefused
	}
	client, err := x.client(false)
	if err != nil {
		return err
	}
	q := &proto.OfferRequest{Host: p.self[:], NamespaceDigest: o.Namespace[:], Group: o.Group, Key: o.Key[:], Ranks: o.Ranks, Tenant: o.Tenant}
	for rank := range entries.Ranks(o.Ranks) {
		n, err := o.Lease.Size(0, rank)
		if err != nil {
			return err
		}
		q.Bytes = append(q.Bytes, uint64(n))
	}
	given := ctx
	ctx, stop := context.WithTimeout(ctx, p.patience)
	defer stop()
	q.Lease = p.lending.hold(o.Lease, caller{}, 0, p.patience)
	defer p.lending.end(func(l *lent) bool { return l.Lease == o.Lease })
	x.count.offers.Add(1)
	since := time.Now()
	r, err := client.Offer(ctx, q)
	switch {
	case given.Err() != nil:
		return given.Err()
	case status.Code(err) == codes.ResourceExhausted, err == nil && !r.GetTaken():
		return moves.ErrRefused
	case err != nil:
		x.failed(asking, since, err)
		return fmt.Errorf("%w: %s: %w", ErrAway, x.addr, err)
	}
	x.count.taken.Add(1)
	return nil
}

// Offer implements [proto.PeerServiceServer].
func (s service) Offer(ctx context.Context, q *proto.OfferRequest) (*proto.OfferResponse, error) {
	if len(q.GetHost()) != len(s.owner.self) || len(q.GetNamespaceDigest()) != len(kv.Digest{}) || len(q.GetKey()) != kv.KeyBytes ||
		q.GetRanks() == 0 || len(q.GetBytes()) != bits.OnesCount64(q.GetRanks()) {
		return nil, status.Error(codes.InvalidArgument, "an offer without a host, namespace, key or pieces of the right length")
	}
	entry := store.LentEntry{Key: kv.Key(q.GetKey())}
	class := s.owner.store.ClassOf(kv.Digest(q.GetNamespaceDigest()), q.GetGroup())
	if class == nil { // no engine of this host has used the namespace
		return &proto.OfferResponse{}, nil
	}
	for _, n := range q.GetBytes() {
		if !soundSize(n, class) {
			return nil, status.Error(codes.InvalidArgument, "the size of a piece")
		}
		entry.Bytes = append(entry.Bytes, int64(n))
	}
	who := s.owner.callerOf(ctx)
	if !s.shares.take(who, takes, 1) {
		return nil, status.Error(codes.ResourceExhausted, "it takes as much as it may")
	}
	defer s.shares.give(who, takes, 1)
	x := s.owner.named([16]byte(q.GetHost()))
	if x == nil || s.owner.turnover() == 0 {
		return &proto.OfferResponse{}, nil
	}
	l := &loan{peer: x, lease: q.GetLease(), namespace: kv.Digest(q.GetNamespaceDigest()), group: q.GetGroup()}
	l.hearsay = addressOf(ctx) != hostOf(x.addr)
	ctx, stop := context.WithTimeout(ctx, s.owner.patience/2) // the peer takes a host that does not answer for dead
	defer stop()
	took := s.owner.store.Take(ctx, l.namespace, &store.Loan{Group: l.group, Tenant: q.GetTenant(), Ranks: q.GetRanks(),
		Entries: []store.LentEntry{entry}, Name: func(_ int, rank uint32, bytes int64, name string) {
			s.owner.fs.add(name, &piece{loan: l, rank: rank, bytes: bytes})
		}})
	return &proto.OfferResponse{Taken: took}, nil
}

// named returns the peer with a host id, or nil if it is not connected. A host draws a new id at each start.
func (p *Peers) named(host [16]byte) *peer {
	for _, x := range p.all() {
		x.mu.Lock()
		is := x.host == host && x.state == Here
		x.mu.Unlock()
		if is {
			return x
		}
	}
	return nil
}
