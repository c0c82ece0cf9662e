package peers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// resource is what callers have shares of.
type resource int

const (
	handshakes resource = iota // connections that have not shown who they are
	lines                      // connections
	leases
	leasedKeys // that leases were asked for: each takes memory, also where many leases have the same entries
	partBuffers
	places // of [shelf]
	takes  // offers that are being taken
	resources
	// From here on, the entries of each root that leases have.
)

// shares divide what this host has for callers. A caller has at most as much as it leaves free, so there is always something left for the next.
// A quarter is set aside for the peers of the configuration, a part for each, and where there are any, others have half together.
type shares struct {
	most [resources]int

	mu    sync.Mutex
	peers int // of the configuration
	held  [resources]int
	of    map[caller]*holding
	pins  map[pin][]leaser // the first one has the entry in its share
}

// holding is what a caller has, by resource.
type holding []int

func (h *holding) at(r resource) *int {
	for len(*h) <= int(r) {
		*h = append(*h, 0)
	}
	return &(*h)[r]
}

// pin is an entry that leases have.
type pin struct{ root, slot uint32 }

// leaser is a caller with so many leases of an entry.
type leaser struct {
	who    caller
	leases int
}

// caller is who has a share: a host of the configuration by its address, else a certificate, or an address where there is none.
type caller struct {
	id    string
	known bool // it is one of the configuration
}

// take takes n of a resource for a caller, or says that it may not have that.
func (s *shares) take(who caller, r resource, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.settle(who)
	if !s.may(who, r, n, s.most[r], s.most[r]-s.held[r]) {
		return false
	}
	s.add(who, r, n)
	return true
}

// may says whether a caller may have n more of a resource of which there are most, and these free. The lock is held.
func (s *shares) may(who caller, r resource, n, most, free int) bool {
	own := 0 // that is set aside for a peer
	if s.peers > 0 {
		own = most / 4 / s.peers
	}
	mine, strange, kept := *s.has(who).at(r), 0, s.peers*own
	for o, has := range s.of {
		if !o.known {
			strange += *has.at(r)
		} else if o != who {
			kept -= min(own, *has.at(r))
		}
	}
	if who.known {
		kept -= own
	}
	borrow := free - max(0, kept)
	if !who.known && s.peers > 0 {
		borrow = min(borrow, most/2-strange)
	}
	return n <= free && (who.known && mine+n <= own || mine+n <= (borrow+mine)/2)
}

// borrower is a caller as the store knows it.
type borrower struct {
	*shares
	who caller
}

// Take implements [store.Share].
func (b borrower) Take(root, slot uint32, most, left int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.settle(b.who)
	at, r := pin{root, slot}, resources+resource(root)
	list := b.pins[at]
	if i := slices.IndexFunc(list, b.is); i >= 0 {
		list[i].leases++
		return true
	}
	if most > 0 && !b.may(b.who, r, 1, most, left) {
		return false
	}
	if len(list) == 0 {
		*b.has(b.who).at(r)++
	}
	b.pins[at] = append(list, leaser{b.who, 1})
	return true
}

// Give implements [store.Share].
func (b borrower) Give(root, slot uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, r := pin{root, slot}, resources+resource(root)
	list := b.pins[at]
	i := slices.IndexFunc(list, b.is)
	if list[i].leases--; list[i].leases > 0 {
		return
	}
	if list = slices.Delete(list, i, i+1); i == 0 {
		*b.has(b.who).at(r)--
		b.settle(b.who)
		if len(list) > 0 {
			*b.has(list[0].who).at(r)++
		}
	}
	if b.pins[at] = list; len(list) == 0 {
		delete(b.pins, at)
	}
}

func (b borrower) is(x leaser) bool { return x.who == b.who }

// give gives n back.
func (s *shares) give(who caller, r resource, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(who, r, -n)
	s.settle(who)
}

func (s *shares) has(who caller) *holding {
	if s.of[who] == nil {
		s.of[who] = &holding{}
	}
	return s.of[who]
}

func (s *shares) add(who caller, r resource, n int) {
	*s.has(who).at(r) += n
	s.held[r] += n
}

// settle forgets a share of nothing.
func (s *shares) settle(who caller) {
	if !slices.ContainsFunc(*s.has(who), func(n int) bool { return n != 0 }) {
		delete(s.of, who)
	}
}

// expect says how many peers the configuration has.
func (s *shares) expect(peers int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers = peers
}

// addressOf is where a call comes from.
func addressOf(ctx context.Context) string {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		return hostOf(p.Addr.String())
	}
	return ""
}

// hostOf is an address without its port; empty: it has none.
func hostOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	return host
}

// lineOf is the connection of a call, nil if it comes from no port.
func lineOf(ctx context.Context) *line {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		c, _ := p.AuthInfo.(*line)
		return c
	}
	return nil
}

func arrivalsOf(info credentials.AuthInfo) *arrivals.Conn {
	if c, ok := info.(*line); ok {
		return c.Conn
	}
	return nil
}

// callerOf is who calls.
func (p *Peers) callerOf(ctx context.Context) caller {
	c, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return caller{}
	}
	if line := lineOf(ctx); line != nil && (line.who.known || !p.expects(hostOf(c.Addr.String()))) {
		return line.who
	}
	return p.callerAt(c.Addr, c.AuthInfo)
}

// expects says whether an address is one of the configuration's hosts.
func (p *Peers) expects(host string) bool {
	known := p.addresses.Load()
	return known != nil && (*known)[host]
}

// callerAt is who has a connection, of which it has shown so much.
func (p *Peers) callerAt(at net.Addr, info credentials.AuthInfo) caller {
	host := hostOf(at.String())
	if p.expects(host) {
		return caller{host, true}
	}
	tls, ok := info.(credentials.TLSInfo)
	if !ok || len(tls.State.PeerCertificates) == 0 {
		return caller{host, false}
	}
	cert := tls.State.PeerCertificates[0]
	sum := sha256.Sum256(cert.Raw)
	who := caller{id: "certificate " + hex.EncodeToString(sum[:8])}
	for _, name := range p.cfg.Hosts { // its address is another's: it calls through a router
		if name, _, err := net.SplitHostPort(name); err == nil && cert.VerifyHostname(name) == nil {
			who.known = true
		}
	}
	return who
}

// leaseTime is how long a lease may last that is wanted for a time.
func leaseTime(wanted *durationpb.Duration) time.Duration {
	return min(max(wanted.AsDuration(), leastLease), longestLease)
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
	if lasts := min(r.GetTime().AsDuration(), l.lasts, longestLease); err == nil && lasts >= leastLease {
		l.ends = since.Add(lasts)
	}
}
