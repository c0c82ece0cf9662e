package peers

import (
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestOffers: what a host evicts goes to one that has room, once, and is a hit at both.
func TestOffers(t *testing.T) {
	const room, more = 48, 40
	hosts := newHosts(t, Config{}, room, 16*room) // of which one peer is lent a quarter
	a, b := hosts[0], hosts[1]
	for n := range byte(2 * room) {
		a.put(n + 1)
	}
	a.await("there is who takes", a.peers.Takes) // it has evicted something
	var all []byte
	for n := range byte(2 * room) {
		if a.look(key(n+1)) == 1 {
			all = append(all, n+1)
		}
	}
	all = all[1:] // one goes before any has left
	for n := range byte(more) {
		all = append(all, 2*room+n+1)
		a.put(2*room + n + 1)
	}
	s := a.peers.Stats()[0]
	if s.Taken < more-2 || s.Turnover < policy.Endless/2 {
		t.Errorf("%+v, want what went taken", s)
	}
	if n := a.peers.lending.held(); n != 0 {
		t.Errorf("%d leases of offers that are over are held, want none", n)
	}
	a.knows(int64(s.Taken))
	if n := b.store.Stats().Roots[0].Entries; n != int(s.Taken) {
		t.Errorf("the peer has %d entries, want the %d that it has taken", n, s.Taken)
	}
	for _, n := range all {
		if a.look(key(n)) != 1 {
			t.Errorf("chunk %d is a miss where it was stored, want it here or lent by who has taken it", n)
		}
	}
	l, err := b.store.Lookup(store.LookupRequest{Namespace: b.space, Keys: []kv.Key{key(all[0])}})
	testenv.OK(t, err)
	defer l.Release()
	p, err := l.Open(0, 0)
	testenv.OK(t, err)
	defer p.Close()
	slot, err := staging.NewSlots(1, 1<<20)
	testenv.OK(t, err)
	defer slot.Close()
	buf, err := slot.Acquire(t.Context())
	testenv.OK(t, err)
	defer buf.Release()
	_, err = p.File().ReadAt(buf.Bytes()[:p.Size()], 0)
	testenv.OK(t, err)
	if got := buf.Bytes()[p.Size()-int64(len(content(1))) : p.Size()]; p.Root() == Path || !bytes.Equal(got, content(all[0])) {
		t.Errorf("root %s has other bytes of a chunk that was taken than were stored, want them in the peer's own root", p.Root())
	}
}

// TestTurnoverIsTold: peers hear how long a host takes to replace what it holds, at first and when that changes.
func TestTurnoverIsTold(t *testing.T) {
	hosts := newHosts(t, Config{}, 48, 48)
	told := func() time.Duration { return hosts[0].peers.Stats()[0].Turnover }
	hosts[0].await("a peer has room", func() bool { return told() > policy.Endless/2 })
	for n := range byte(120) {
		hosts[1].put(n + 1)
	}
	hosts[0].await("it has none any more", func() bool { return told() < time.Hour })
}

// TestNoOffers: a peer that does not say that it takes offers gets none.
func TestNoOffers(t *testing.T) {
	r := newTaker(t, &fake{})
	for n := range byte(40) {
		r.put(n + 1)
	}
	if s := r.peers.Stats()[0]; s.Offers != 0 || s.Turnover != 0 || r.peers.Takes() {
		t.Errorf("%+v, want no offer to a host that takes none", s)
	}
	if r.peers.lending.turnover() == 0 {
		t.Error("this host says that it takes no offers")
	}
}

// newTaker is a host with room for 16 entries, of which the fake is the only peer.
func newTaker(t *testing.T, f *fake) *rig {
	t.Helper()
	p, err := New(Config{Listen: "127.0.0.1:0", Hosts: []string{f.serve(t)}})
	testenv.OK(t, err)
	r := &rig{T: t, peers: p}
	r.open(16)
	r.await("the peer is here", func() bool { return len(p.all()) == 1 && p.all()[0].is(Here) })
	return r
}

// offered is what comes of an offer in the fake's name.
func (r *rig) offered(ctx context.Context, change ...func(*proto.OfferRequest)) (*proto.OfferResponse, error) {
	digest, k := space().Digest(), key(1)
	q := &proto.OfferRequest{Host: bytes.Repeat([]byte{7}, 16), NamespaceDigest: digest[:], Key: k[:], Ranks: 1, Lease: 1, Bytes: []uint64{pieceBytes}}
	for _, c := range change {
		c(q)
	}
	return service{r.peers.lending, &r.peers.offers}.Offer(ctx, q)
}

// byPeer is the context of a call from where the fake answers.
func byPeer(t *testing.T) context.Context {
	return grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
}

// TestHostileOffers: an offer that is none is refused, and one that cannot be fetched, or has wrong bytes, leaves nothing.
func TestHostileOffers(t *testing.T) {
	fetched := func(_ *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
		return st.Send(&proto.FetchResponse{Data: make([]byte, pieceBytes)})
	}
	f := &fake{fetch: fetched, lease: lend(pieceBytes)}
	r := newTaker(t, f)
	p := r.peers
	x := p.all()[0]
	offer := func(change func(*proto.OfferRequest)) (bool, codes.Code) {
		m, err := r.offered(byPeer(t), change)
		return m.GetTaken(), status.Code(err)
	}
	for name, change := range map[string]func(*proto.OfferRequest){
		"a short host":       func(q *proto.OfferRequest) { q.Host = q.Host[1:] },
		"a long namespace":   func(q *proto.OfferRequest) { q.NamespaceDigest = append(q.NamespaceDigest, 1) },
		"no key":             func(q *proto.OfferRequest) { q.Key = nil },
		"no ranks":           func(q *proto.OfferRequest) { q.Ranks, q.Bytes = 0, nil },
		"a size too few":     func(q *proto.OfferRequest) { q.Ranks = 3 },
		"a size too many":    func(q *proto.OfferRequest) { q.Bytes = append(q.Bytes, pieceBytes) },
		"an odd size":        func(q *proto.OfferRequest) { q.Bytes[0]++ },
		"an immense size":    func(q *proto.OfferRequest) { q.Bytes[0] = 1 << 63 },
		"nothing in a piece": func(q *proto.OfferRequest) { q.Bytes[0] = 0 },
		"more than a piece":  func(q *proto.OfferRequest) { q.Bytes[0] = 1 << 40 },
	} {
		if took, code := offer(change); took || code != codes.InvalidArgument {
			t.Errorf("%s: taken %v, %s, want it refused", name, took, code)
		}
	}
	for name, change := range map[string]func(*proto.OfferRequest){
		"of a host that is not there": func(q *proto.OfferRequest) { q.Host[0]++ },
		"of an unknown namespace":     func(q *proto.OfferRequest) { q.NamespaceDigest = make([]byte, len(q.NamespaceDigest)) },
		"of an unknown group":         func(q *proto.OfferRequest) { q.Group = 9 },
	} {
		if took, code := offer(change); took || code != codes.OK {
			t.Errorf("an offer %s: taken %v, %s, want it declined", name, took, code)
		}
	}
	if n := x.count.blamed.Load(); n != 0 || !x.is(Here) {
		t.Errorf("%d pieces blamed before one with wrong bytes was fetched, want none", n)
	}
	p.lending.shares.add(caller{}, takes, mostTakes)
	if took, code := offer(func(*proto.OfferRequest) {}); took || code != codes.ResourceExhausted {
		t.Errorf("an offer beyond those that are taken at once: taken %v, %s, want it refused", took, code)
	}
	p.lending.shares.give(caller{}, takes, mostTakes)
	if took, _ := offer(func(*proto.OfferRequest) {}); took || x.count.blamed.Load() != 1 || !x.is(Alone) {
		t.Errorf("an offer with wrong bytes: taken %v, %d pieces blamed, the peer is %s, want it blamed and left alone", took, x.count.blamed.Load(),
			p.Stats()[0].State)
	}
	st := r.store.Stats()
	if n := len(p.fs.names()); n != 0 || st.Roots[0].Entries != 0 || st.Roots[1].Entries != 0 || st.Roots[1].Used != 0 {
		t.Errorf("%d names, %d entries here and %d borrowed are left, want none", n, st.Roots[0].Entries, st.Roots[1].Entries)
	}
}

// TestOfferEnds: an offer whose caller has gone is dropped, whatever its bytes do.
func TestOfferEnds(t *testing.T) {
	begun, end := make(chan struct{}, 64), make(chan struct{})
	f := &fake{lease: lend(pieceBytes), fetch: func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		begun <- struct{}{}
		<-end
		return status.Error(codes.Unavailable, "")
	}}
	r := newTaker(t, f)
	p := r.peers
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan bool)
	go func() {
		m, _ := r.offered(ctx)
		over <- m.GetTaken()
	}()
	<-begun
	cancel()
	close(end)
	if <-over {
		t.Error("an offer was taken that has no bytes")
	}
	if n := len(p.fs.names()); n != 0 {
		t.Errorf("%d names are left, want none", n)
	}
	p.lending.shares.isFree(t, "without offers")
}

// TestOffersOfOne: a peer that offers all the time, and does not send, leaves others' offers a place.
func TestOffersOfOne(t *testing.T) {
	end := make(chan struct{})
	f := &fake{lease: lend(pieceBytes), fetch: func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		<-end
		return status.Error(codes.Unavailable, "")
	}}
	r := newTaker(t, f)
	r.peers.patience = time.Hour
	var calls sync.WaitGroup
	var refused [3]atomic.Int64
	offer := func(who, n byte) {
		calls.Go(func() {
			_, err := r.offered(calledBy(t, who), func(q *proto.OfferRequest) { q.Key[0] = n })
			if status.Code(err) == codes.ResourceExhausted {
				refused[who].Add(1)
			}
		})
	}
	defer calls.Wait()
	defer close(end)
	for n := range byte(2 * mostTakes) {
		offer(1, n)
	}
	r.await("a caller is refused", func() bool { return refused[1].Load() >= mostTakes })
	offer(2, 100)
	r.await("another is taken from", func() bool {
		s := &r.peers.lending.shares
		s.mu.Lock()
		defer s.mu.Unlock()
		return refused[2].Load() > 0 || *s.has(caller{id: "10.0.0.2"}).at(takes) > 0
	})
	if n := refused[2].Load(); n != 0 {
		t.Error("the offer of a peer is refused while another has offers, want it taken")
	}
}

// TestOffersWithoutAnswer: an offer that is not answered is dropped in time, and what was offered goes. A peer that answers none is left alone.
func TestOffersWithoutAnswer(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	r := newTaker(t, &fake{offer: func(*proto.OfferRequest) (*proto.OfferResponse, error) {
		<-hang
		return nil, status.Error(codes.Unavailable, "")
	}})
	r.peers.patience = 50 * time.Millisecond
	next := byte(0)
	r.await("the peer was offered something in vain, and is left alone", func() bool {
		next++
		r.put(next)
		return r.peers.all()[0].is(Alone)
	})
	if s := r.peers.Stats()[0]; s.Offers < mostFailures || s.Taken != 0 || r.peers.lending.held() != 0 {
		t.Errorf("%+v, %d leases held, want some offers, none taken and none held", s, r.peers.lending.held())
	}
	r.await("nothing more is offered", func() bool { return !r.peers.Takes() })
}

// TestForgedOffers: whatever is offered in the name of a peer by another address, it is no fault of that peer.
func TestForgedOffers(t *testing.T) {
	var over atomic.Bool
	f := &fake{lease: lend(pieceBytes), fetch: func(_ *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
		if over.Load() {
			return status.Error(codes.NotFound, "the lease is over")
		}
		return st.Send(&proto.FetchResponse{Data: make([]byte, pieceBytes)})
	}}
	r := newTaker(t, f)
	x := r.peers.all()[0]
	for range 2 {
		for range mostFailures {
			m, err := r.offered(calledBy(t, 9))
			testenv.OK(t, err)
			if m.GetTaken() || !x.is(Here) || x.count.blamed.Load() != 0 || x.count.failures.Load() != 0 {
				t.Errorf("taken %v, %+v, want it declined and the peer asked as before", m.GetTaken(), r.peers.Stats()[0])
			}
		}
		over.Store(true)
	}
}

// TestSlowTaker: who has no time to take an offer declines it before the patience of who offers it is over, so that it is not taken for dead.
func TestSlowTaker(t *testing.T) {
	begun, end := make(chan struct{}, 64), make(chan struct{})
	r := newTaker(t, &fake{lease: lend(pieceBytes), fetch: func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		begun <- struct{}{}
		<-end
		return status.Error(codes.Unavailable, "")
	}})
	offer := func(n byte) (*proto.OfferResponse, error) {
		return r.offered(byPeer(t), func(q *proto.OfferRequest) { k := key(n); q.Key = k[:] })
	}
	var others sync.WaitGroup
	for n := range byte(2) { // as many as are copied at once
		others.Go(func() { _, _ = offer(n + 1) })
		<-begun
	}
	r.peers.patience = 50 * time.Millisecond
	if m, err := offer(3); err != nil || m.GetTaken() || !r.peers.all()[0].is(Here) {
		t.Errorf("taken %v, %v, %+v, want it declined before one that is fetched has ended", m.GetTaken(), err, r.peers.Stats()[0])
	}
	close(end)
	others.Wait()
}
