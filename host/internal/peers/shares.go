package peers

import (
	"context"
	"net"
	"slices"
	"sync"

	grpcpeer "google.golang.org/grpc/peer"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
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
