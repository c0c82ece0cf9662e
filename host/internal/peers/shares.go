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

// resource is a limited resource that callers have shares of.
type resource int

const (
	handshakes resource = iota // connections before the end of their handshake
	lines                      // open connections
	leases
	leasedKeys // keys in requests for leases; each takes memory even if many leases have the same entry
	partBuffers
	places // slots of the [shelf]
	takes  // offers that this host is taking
	resources
	// The following values count the entries that leases pin, one value for each root.
)

// shares divides the resources of this host among its callers. A caller may take at most as much as it leaves free, so the next
// caller always finds some. A quarter of each resource is reserved for the configured peers in equal parts. If there are
// configured peers, all other callers together get at most half.
type shares struct {
	most [resources]int

	mu    sync.Mutex
	peers int // number of configured peers
	held  [resources]int
	of    map[caller]*holding
	pins  map[pin][]leaser // callers with leases of a pinned entry; the first one is charged for it
}

// holding is the amount that a caller has of each resource.
type holding []int

func (h *holding) at(r resource) *int {
	for len(*h) <= int(r) {
		*h = append(*h, 0)
	}
	return &(*h)[r]
}

// pin identifies an entry that is leased.
type pin struct{ root, slot uint32 }

// leaser is a caller and the number of its leases of one entry.
type leaser struct {
	who    caller
	leases int
}

// caller identifies the owner of a share. It is the address of a configured host; for other hosts it is the certificate, or the
// address if there is none.
type caller struct {
	id    string
	known bool // true for a configured host
}

// sender returns the caller as the sender of what arrives. Callers that are not configured are a crowd.
func (c caller) sender() arrivals.Sender {
	if c.known {
		return arrivals.Sender{ID: c.id}
	}
	return arrivals.Sender{ID: c.id, Crowd: "strangers"}
}

// take charges a caller for n of a resource. It returns false if the caller may not have that much.
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

// may reports whether a caller may have n more of a resource, with most in total and free unused. The lock must be held.
func (s *shares) may(who caller, r resource, n, most, free int) bool {
	own := 0 // amount reserved for each configured peer
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

// borrower is the share of one caller in the form that the store uses.
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

// give returns n of a resource.
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

// settle forgets a caller that has nothing.
func (s *shares) settle(who caller) {
	if !slices.ContainsFunc(*s.has(who), func(n int) bool { return n != 0 }) {
		delete(s.of, who)
	}
}

// expect sets the number of configured peers.
func (s *shares) expect(peers int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers = peers
}

// addressOf returns the address, without port, of the host that makes a call.
func addressOf(ctx context.Context) string {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		return hostOf(p.Addr.String())
	}
	return ""
}

// hostOf returns an address without its port, or an empty string if it has no port.
func hostOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	return host
}

// lineOf returns the connection of a call, or nil if it did not come through the listener.
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

// callerOf returns the caller of a request.
func (p *Peers) callerOf(ctx context.Context) caller {
	c, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return caller{}
	}
	if line := lineOf(ctx); line != nil {
		return p.callerOn(line, c.Addr)
	}
	return p.callerAt(c.Addr, c.AuthInfo)
}

// callerOn returns the caller of a connection. It may be known since the connection began.
func (p *Peers) callerOn(c *line, at net.Addr) caller {
	if c.who.known || !p.expects(hostOf(at.String())) {
		return c.who
	}
	return p.callerAt(at, c)
}

// expects reports whether an address belongs to a configured host.
func (p *Peers) expects(host string) bool {
	known := p.addresses.Load()
	return known != nil && (*known)[host]
}

// callerAt identifies the owner of a connection by its address and by its certificate, if it has shown one.
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
	for _, name := range p.cfg.Hosts { // the host is configured, but its calls come from another address, as through a router
		if name, _, err := net.SplitHostPort(name); err == nil && cert.VerifyHostname(name) == nil {
			who.known = true
		}
	}
	return who
}

// leaseTime limits the requested time of a lease to the allowed range.
func leaseTime(wanted *durationpb.Duration) time.Duration {
	return min(max(wanted.AsDuration(), leastLease), longestLease)
}

// Renew implements [proto.PeerServiceServer].
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

// left returns the time until a loan ends.
func (x *peer) left(l *loan) time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Until(l.ends)
}

// renew asks the lender to extend a loan that is still in use after half of its time. This happens when a load is slow or
// waits.
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
