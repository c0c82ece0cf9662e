package peers

import (
	"context"
	"fmt"
	"math/bits"
	"sync/atomic"
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
)

// offers gives entries that are evicted here to a peer, and takes those that peers offer.
type offers struct {
	from     *borrowing
	to       *lending // nil if this host lends nothing; then it makes no offers and takes none
	fs       *FS
	taker    atomic.Pointer[peer] // peer that gets the offers of entries evicted here, or nil
	turn     int                  // alternates between takers with the same turnover; used by choose only
	patience time.Duration        // deadline of an offer
}

// choose chooses the peer that gets the offers of entries evicted here.
func (o *offers) choose(list []*peer) {
	own := o.to.turnover()
	if own == 0 {
		return
	}
	turnovers := make([]time.Duration, len(list))
	for i, x := range list {
		if x.is(Here) {
			turnovers[i] = time.Duration(x.turnover.Load())
		}
	}
	o.turn++
	var taker *peer
	if n := policy.Taker(turnoverOf(own), turnovers, o.turn); n >= 0 {
		taker = list[n]
	}
	o.taker.Store(taker)
}

// Takes implements [store.Lender].
func (o *offers) Takes() bool { return o.taker.Load() != nil }

// Offer implements [store.Lender].
func (o *offers) Offer(ctx context.Context, evicted *store.Offer) error {
	x := o.taker.Load()
	if x == nil {
		return moves.ErrRefused
	}
	client, err := x.client(false)
	if err != nil {
		return err
	}
	q := &proto.OfferRequest{Host: o.from.self[:], NamespaceDigest: evicted.Namespace[:], Group: evicted.Group, Key: evicted.Key[:], Ranks: evicted.Ranks, Tenant: evicted.Tenant}
	for rank := range entries.Ranks(evicted.Ranks) {
		n, err := evicted.Lease.Size(0, rank)
		if err != nil {
			return err
		}
		q.Bytes = append(q.Bytes, uint64(n))
	}
	given := ctx
	ctx, stop := context.WithTimeout(ctx, o.patience)
	defer stop()
	q.Lease = o.to.hold(evicted.Lease, caller{}, 0, o.patience)
	defer o.to.end(func(l *lent) bool { return l.Lease == evicted.Lease })
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

// take answers an offer.
func (o *offers) take(ctx context.Context, q *proto.OfferRequest) (*proto.OfferResponse, error) {
	if len(q.GetHost()) != len(o.from.self) || len(q.GetNamespaceDigest()) != len(kv.Digest{}) || len(q.GetKey()) != kv.KeyBytes ||
		q.GetRanks() == 0 || len(q.GetBytes()) != bits.OnesCount64(q.GetRanks()) {
		return nil, status.Error(codes.InvalidArgument, "an offer without a host, namespace, key or pieces of the right length")
	}
	entry := store.LentEntry{Key: kv.Key(q.GetKey())}
	class := o.from.store.ClassOf(kv.Digest(q.GetNamespaceDigest()), q.GetGroup())
	if class == nil { // no engine of this host has used the namespace
		return &proto.OfferResponse{}, nil
	}
	for _, n := range q.GetBytes() {
		if !soundSize(n, class) {
			return nil, status.Error(codes.InvalidArgument, "the size of a piece")
		}
		entry.Bytes = append(entry.Bytes, int64(n))
	}
	who := o.from.callerOf(ctx)
	if !o.to.shares.take(who, takes, 1) {
		return nil, status.Error(codes.ResourceExhausted, "it takes as much as it may")
	}
	defer o.to.shares.give(who, takes, 1)
	x := o.from.named([16]byte(q.GetHost()))
	if x == nil || o.to.turnover() == 0 {
		return &proto.OfferResponse{}, nil
	}
	l := &loan{peer: x, lease: q.GetLease(), namespace: kv.Digest(q.GetNamespaceDigest()), group: q.GetGroup()}
	l.hearsay = addressOf(ctx) != hostOf(x.addr)
	ctx, stop := context.WithTimeout(ctx, o.patience/2) // the peer takes a host that does not answer for dead
	defer stop()
	took := o.from.store.Take(ctx, l.namespace, &store.Loan{Group: l.group, Tenant: q.GetTenant(), Ranks: q.GetRanks(),
		Entries: []store.LentEntry{entry}, Name: func(_ int, rank uint32, bytes int64, name string) {
			o.fs.add(name, &piece{loan: l, rank: rank, bytes: bytes})
		}})
	return &proto.OfferResponse{Taken: took}, nil
}
