package peers

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// share is what one caller has of this host: at most half of all leases, half of their keys, and [buffersOfOne].
type share struct {
	leases, keys int
	fetches      int           // calls of Fetch
	buffers      chan struct{} // a place for each that may have one
}

// caller is who calls, by the address: a peer has several connections.
func caller(ctx context.Context) string {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if host, _, err := net.SplitHostPort(p.Addr.String()); err == nil {
			return host
		}
	}
	return ""
}

// of is the share of a caller, which may be new. The lock is held.
func (l *lending) of(who string) *share {
	has := l.shares[who]
	if has == nil {
		has = &share{buffers: make(chan struct{}, buffersOfOne)}
		l.shares[who] = has
	}
	return has
}

// settle forgets a share of nothing. The lock is held.
func (l *lending) settle(who string, has *share) {
	if has.leases == 0 && has.fetches == 0 {
		delete(l.shares, who)
	}
}

// many says that a lease of so many more keys is more than there may be, or than the caller may have.
func (l *lending) many(who string, keys int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	has := l.of(who)
	defer l.settle(who, has)
	return len(l.leases) >= mostLent || l.keys+keys > mostLentKeys || has.leases >= mostLent/2 || has.keys+keys > mostLentKeys/2
}

// account counts leases and keys of a caller. The lock is held.
func (l *lending) account(who string, leases, keys int) {
	has := l.of(who)
	has.leases, has.keys, l.keys = has.leases+leases, has.keys+keys, l.keys+keys
	l.settle(who, has)
}

// fetches counts a call of Fetch that begins, or has ended.
func (l *lending) fetches(who string, n int) *share {
	l.mu.Lock()
	defer l.mu.Unlock()
	has := l.of(who)
	has.fetches += n
	l.settle(who, has)
	return has
}

// leaseTime is how long a lease may last that is wanted for a time.
func leaseTime(wanted *durationpb.Duration) time.Duration {
	return min(max(wanted.AsDuration(), time.Second), longestLease)
}

// Renew implements the service.
func (s service) Renew(_ context.Context, q *proto.RenewRequest) (*proto.RenewResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, lasts := s.leases[q.GetLease()], leaseTime(q.GetTime())
	if x == nil {
		return nil, status.Error(codes.NotFound, "the lease is over")
	}
	x.ends = time.Now().Add(lasts)
	return &proto.RenewResponse{Time: durationpb.New(lasts)}, nil
}

// left is how long a loan lasts yet.
func (x *peer) left(l *loan) time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Until(l.ends)
}

// renew has a loan last longer that is in use when half of its time is over: a load that takes long, or waits.
func (x *peer) renew(l *loan) {
	client, err := x.client(false)
	if err != nil {
		return
	}
	ctx, stop := context.WithTimeout(x.run, returnTimeout)
	defer stop()
	since := time.Now()
	r, err := client.Renew(ctx, &proto.RenewRequest{Lease: l.lease, Time: durationpb.New(l.lasts)})
	x.mu.Lock()
	defer x.mu.Unlock()
	l.renewing = false
	if err == nil {
		l.ends = since.Add(min(r.GetTime().AsDuration(), longestLease))
	}
}
