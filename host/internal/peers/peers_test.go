package peers

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/testkit/certificates"
	"github.com/kvhost/kvhost/host/kv"
)

// fake is a peer that answers as it is told.
type fake struct {
	proto.UnimplementedPeerServiceServer
	has   []uint64 // fingerprints
	lease func(*proto.LeaseRequest) (*proto.LeaseResponse, error)
	fetch func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error
	offer func(*proto.OfferRequest) (*proto.OfferResponse, error) // nil: it takes no offers
	place func(context.Context, *proto.PlaceRequest) (*proto.PlaceResponse, error)
	nixl  []byte // its metadata
	given atomic.Int64
	hangs atomic.Bool // it answers no Return
	renew func(*proto.RenewRequest) (*proto.RenewResponse, error)
	id    byte // of its host; 0: 7
}

func (f *fake) Residents(_ *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) error {
	m := &proto.ResidentsResponse{Host: bytes.Repeat([]byte{cmp.Or(f.id, 7)}, 16), Whole: true, Nixl: f.nixl}
	if f.offer != nil {
		m.Turnover = new(uint64(1 << 40))
	}
	for _, p := range f.has {
		for range 8 {
			m.Added = append(m.Added, byte(p))
			p >>= 8
		}
	}
	if err := st.Send(m); err != nil {
		return err
	}
	<-st.Context().Done()
	return nil
}

func (f *fake) Lease(_ context.Context, q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	return f.lease(q)
}
func (f *fake) Return(ctx context.Context, q *proto.ReturnRequest) (*proto.ReturnResponse, error) {
	if f.hangs.Load() {
		<-ctx.Done() // the caller's deadline too, which the caller may see later: no answer then, either
		return nil, status.FromContextError(ctx.Err()).Err()
	} else if q.GetLease() != 0 {
		f.given.Add(1)
	}
	return &proto.ReturnResponse{}, nil
}
func (f *fake) Offer(_ context.Context, q *proto.OfferRequest) (*proto.OfferResponse, error) {
	return f.offer(q)
}
func (f *fake) Place(ctx context.Context, q *proto.PlaceRequest) (*proto.PlaceResponse, error) {
	return f.place(ctx, q)
}
func (f *fake) Renew(_ context.Context, q *proto.RenewRequest) (*proto.RenewResponse, error) {
	return f.renew(q)
}
func (f *fake) Fetch(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
	return f.fetch(q, st)
}

// rig is a store that borrows from one fake.
type rig struct {
	*testing.T
	peers *Peers
	store *store.Store
	space *catalog.Namespace
	peer  *peer
}

const planes = 2

func space() *kv.Namespace {
	return &kv.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: kv.Uniform(2, planes, 1, 8192)}}}
}

func key(n byte) kv.Key { return kv.Key{n, 1} }

// serve is where the fake answers.
func (f *fake) serve(t *testing.T) string { return serve(t, f) }

func serve(t *testing.T, s proto.PeerServiceServer) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	g := grpc.NewServer()
	proto.RegisterPeerServiceServer(g, s)
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	return l.Addr().String()
}

func newRig(t *testing.T, f *fake, hosts ...byte) *rig { return newRigWith(t, f, Config{}, hosts...) }

func newRigWith(t *testing.T, f *fake, c Config, hosts ...byte) *rig {
	ns := space()
	for _, n := range hosts {
		f.has = append(f.has, kv.Fingerprint(ns.Digest(), 0, key(n)))
	}
	r := &rig{T: t}
	c.Hosts, c.Deadline = append(c.Hosts, f.serve(t)), cmp.Or(c.Deadline, time.Minute)
	var err error
	r.peers, err = New(c)
	testenv.OK(t, err)
	r.store, err = store.Open(t.Context(), store.Config{Roots: []store.RootConfig{{Path: t.TempDir(), Capacity: 1 << 20}, r.peers.Root(1)}})
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, errors.Join(r.peers.Close(), r.store.Close(), r.peers.CloseFiles()))
	})
	r.space, err = r.store.Namespace(t.Context(), ns)
	testenv.OK(t, err)
	r.peers.Start(r.store)
	r.await("the peer is here", func() bool {
		list := r.peers.all()
		return len(list) == len(c.Hosts) && !slices.ContainsFunc(list, func(x *peer) bool { return !x.is(Here) })
	})
	r.peer = r.peers.all()[0]
	return r
}

// started begins what a host does, with a store of its own, until the test ends.
func started(t *testing.T, p *Peers) {
	t.Helper()
	s, err := store.Open(t.Context(), store.Config{Roots: []store.RootConfig{{Path: t.TempDir(), Capacity: 1 << 20}, p.Root(1)}})
	testenv.OK(t, err)
	p.Start(s)
	t.Cleanup(func() { testenv.NoError(t, errors.Join(p.Close(), s.Close(), p.CloseFiles())) })
}

// names are those of the pieces that are borrowed.
func (f *FS) names() []string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return slices.Collect(maps.Keys(f.pieces))
}

func (r *rig) await(what string, ok func() bool) {
	r.Helper()
	testenv.Until(r, what, ok, func() any { return r.peers.Stats() })
}

// look is a lookup with the help of peers, as sessions make it.
func (r *rig) look(keys ...kv.Key) (hits int) {
	r.Helper()
	q := store.LookupRequest{Namespace: r.space, Keys: keys, Ranks: 1}
	l, err := r.store.Lookup(q)
	testenv.OK(r, err)
	if ask := r.peers.Promise(&q, l, true, nil); ask != nil && ask.Run(r.Context()) {
		q.After = l
		l, err = r.store.Lookup(q)
		testenv.OK(r, err)
	}
	l.Release()
	return l.Hits()
}

// lend is the answer that all that is asked for is there.
func lend(bytes uint64) func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	return func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
		m := &proto.LeaseResponse{Lease: 1, Time: durationpb.New(time.Minute)}
		for i := range len(q.GetKeys()) / kv.KeyBytes {
			m.Entries = append(m.Entries, &proto.LentEntry{Index: uint32(i), Bytes: []uint64{bytes}})
		}
		return m, nil
	}
}

const pieceBytes = 4096 + 2*planes*8192

// TestPromises: a promise that is not kept is struck out and asked for once; a session's lookup is not made again for it.
func TestPromises(t *testing.T) {
	f := &fake{lease: func(*proto.LeaseRequest) (*proto.LeaseResponse, error) { return &proto.LeaseResponse{}, nil }}
	r := newRig(t, f, 1, 2)
	for range 5 {
		if n := r.look(key(1), key(2)); n != 0 {
			t.Errorf("%d hits, want none", n)
		}
	}
	if s := r.peers.Stats()[0]; s.Asks != 1 || s.Struck != 1 {
		t.Errorf("%d asks and %d promises struck out, want 1 and 1", s.Asks, s.Struck)
	}
	q, keys := store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(9), key(8)}, Ranks: 1}, 0
	l, err := r.store.Lookup(q)
	testenv.OK(t, err)
	for _, leading := range []bool{true, false} {
		if n := testing.AllocsPerRun(100, func() {
			if r.peers.Promise(&q, l, leading, nil) != nil {
				keys++
			}
		}); n != 0 || keys != 0 {
			t.Errorf("%.0f allocations and %d promises where there is none, want none", n, keys)
		}
	}
	l.Release()
	if n := r.look(key(9)); n != 0 || r.peers.Stats()[0].Asks != 1 {
		t.Errorf("%d hits and %d asks after a key that no peer promises, want none more", n, r.peers.Stats()[0].Asks)
	}
}

// TestLoansEnd: what a peer lends is found until the lease ends, and is given back; a lookup for another host never finds it.
func TestLoansEnd(t *testing.T) {
	f := &fake{lease: lend(pieceBytes)}
	r := newRig(t, f, 1, 2)
	if n := r.look(key(1), key(2)); n != 2 {
		t.Fatalf("%d hits, want 2", n)
	}
	l, err := r.store.Lend(r.space.Digest, borrower{shares: &shares{}}, store.LookupRequest{Keys: []kv.Key{key(1)}, Ranks: 1, Leading: true})
	testenv.OK(t, err)
	if l.Hits() != 0 {
		t.Error("what is borrowed was lent to another host")
	}
	l.Release()
	r.store.Lendable(func(list []entries.Change) bool {
		t.Errorf("peers are told of %d entries that are only borrowed", len(list))
		return false
	})
	r.peer.giveBack()
	if n := r.look(key(1)); n != 1 || r.peers.Stats()[0].Asks != 1 {
		t.Errorf("%d hits and %d asks before the lease is due, want 1 and 1", n, r.peers.Stats()[0].Asks)
	}
	q := store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(1)}, Ranks: 1}
	held, err := r.store.Lookup(q)
	testenv.OK(t, err)
	r.peer.mu.Lock()
	for _, l := range r.peer.loans {
		l.since = time.Now().Add(-unused)
	}
	r.peer.mu.Unlock()
	r.await("what no lease has is given back", func() bool { return len(r.peers.fs.names()) == 1 })
	held.Release()
	r.await("the rest is given back, and the lease", func() bool { return len(r.peers.fs.names()) == 0 && f.given.Load() == 1 })
	if s := r.store.Stats().Roots[1]; s.Used != 0 || s.Entries != 0 || s.Vanished != 0 {
		t.Errorf("%d bytes and %d entries are left, %d files vanished, want none", s.Used, s.Entries, s.Vanished)
	}
}

// TestLoansAreReturnedLater: the lease of a peer that is left alone, and keeps entries for it, is given back when the peer is asked again.
func TestLoansAreReturnedLater(t *testing.T) {
	f := &fake{lease: lend(pieceBytes)}
	r := newRig(t, f, 1)
	if n := r.look(key(1)); n != 1 {
		t.Fatalf("%d hits, want 1", n)
	}
	r.peer.leaveAlone(longestPause, ErrAway)
	r.await("what it lent is forgotten", func() bool { return len(r.peers.fs.names()) == 0 })
	r.peer.mu.Lock()
	r.peer.until = time.Now()
	r.peer.mu.Unlock()
	r.await("its lease is given back", func() bool { return f.given.Load() == 1 })
}

// TestLoansAreRenewed: what a lease of this host has stays borrowed beyond the loan's end, if the peer has it so, and only then.
func TestLoansAreRenewed(t *testing.T) {
	var renewals atomic.Int64
	const first = 2 * time.Second
	f := &fake{
		lease: func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
			m, err := lend(pieceBytes)(q)
			m.Time = durationpb.New(first)
			return m, err
		},
		renew: func(q *proto.RenewRequest) (*proto.RenewResponse, error) {
			if renewals.Add(1) > 1 {
				return nil, status.Error(codes.NotFound, "")
			}
			return &proto.RenewResponse{Time: durationpb.New(2 * first)}, nil
		},
	}
	r := newRig(t, f, 1, 2)
	if n := r.look(key(1), key(2)); n != 2 {
		t.Fatalf("%d hits, want 2", n)
	}
	held, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(1)}, Ranks: 1})
	testenv.OK(t, err)
	defer held.Release()
	since := time.Now()
	r.await("the loan is renewed, and the peer refuses to do so again", func() bool { return renewals.Load() >= 2 })
	if names := r.peers.fs.names(); len(names) != 1 {
		t.Errorf("%d pieces are borrowed, want the one that is in use", len(names))
	}
	r.await("what was renewed ends", func() bool { return len(r.peers.fs.names()) == 0 })
	if d := time.Since(since); d < first+first/2 {
		t.Errorf("the loan ended after %s, want it renewed", d)
	}
}

// TestReadsBound: more than this host may read from others is not promised, and what was promised waits, and fails without a fault of the peer.
func TestReadsBound(t *testing.T) {
	f := &fake{lease: lend(pieceBytes), fetch: func(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
		return st.Send(&proto.FetchResponse{Data: make([]byte, q.GetBytes())})
	}}
	r := newRig(t, f, 1, 2)
	if n := r.look(key(1)); n != 1 {
		t.Fatalf("%d hits, want 1", n)
	}
	file, err := r.peers.fs.OpenFile(r.peers.fs.names()[0], os.O_RDONLY, 0)
	testenv.OK(t, err)
	const bytes = 8192
	r.peers.reads = pace{rate: bytes}
	since := time.Now()
	for range 2 {
		_, err = file.ReadAt(make([]byte, bytes), 0)
		testenv.OK(t, err)
	}
	if d := time.Since(since); d < time.Second*9/10 {
		t.Errorf("two seconds' worth was read in %s, want the second to wait for its turn", d)
	}
	r.peers.reads.free = time.Now().Add(time.Hour)
	if n := r.look(key(2)); n != 0 || r.peers.Stats()[0].Asks != 1 {
		t.Errorf("%d hits and %d asks while as much is read as may be, want none more", n, r.peers.Stats()[0].Asks)
	}
	r.peers.cfg.Budget = 0
	if _, err := file.ReadAt(make([]byte, bytes), 0); !errors.Is(err, ErrAway) {
		t.Errorf("%v for a read that would wait too long, want %v", err, ErrAway)
	}
	if s := r.peers.Stats()[0]; s.Failures != 0 || s.Bytes != 2*bytes {
		t.Errorf("%d failures and %d bytes, want 0 and %d", s.Failures, s.Bytes, 2*bytes)
	}
}

// TestLateOffer: what a peer has offered, and does not send because the offer is over, is no fault of the peer. What it has lent is.
func TestLateOffer(t *testing.T) {
	f := &fake{lease: lend(pieceBytes), fetch: func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		return status.Error(codes.NotFound, "the lease is over")
	}}
	r := newRig(t, f, 1)
	if n := r.look(key(1)); n != 1 {
		t.Fatalf("%d hits, want 1", n)
	}
	lent := r.peers.fs.piece(r.peers.fs.names()[0])
	for want, p := range map[uint64]*piece{0: {loan: &loan{peer: r.peer}, bytes: pieceBytes}, 1: lent} {
		before := r.peers.Stats()[0].Failures
		if err := p.read(make([]byte, 8192), 4096); !errors.Is(err, ErrAway) {
			t.Errorf("%v, want %v", err, ErrAway)
		}
		if n := r.peers.Stats()[0].Failures - before; n != want {
			t.Errorf("%d failures, want %d", n, want)
		}
	}
}

// TestPeerRemoved: nothing is left of what a host has lent that the configuration's names lead to no more, whatever is being given back.
func TestPeerRemoved(t *testing.T) {
	r := newRig(t, &fake{lease: lend(pieceBytes)}, 1, 2)
	if n := r.look(key(1), key(2)); n != 2 {
		t.Fatalf("%d hits, want 2", n)
	}
	held, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(1)}, Ranks: 1})
	testenv.OK(t, err)
	defer held.Release()
	r.peers.fs.mu.RLock() // keeps an entry that is given back from going
	r.peer.mu.Lock()
	for _, l := range r.peer.loans {
		l.since = time.Now().Add(-unused)
	}
	r.peer.mu.Unlock()
	r.await("what is due is being given back", func() bool {
		r.peer.mu.Lock()
		defer r.peer.mu.Unlock()
		return len(r.peer.loans) == 0
	})
	r.peers.mu.Lock()
	r.peers.cfg.Hosts = nil
	r.peers.mu.Unlock()
	r.peers.settle()
	r.await("the peer has left", func() bool { return r.peer.is(Away) })
	r.peers.fs.mu.RUnlock()
	r.await("all is given back", func() bool { return len(r.peers.fs.names()) == 0 })
}

// TestSlowPeer: a peer that does not answer costs no lookup more than the deadline, and is left alone after some.
func TestSlowPeer(t *testing.T) {
	hang := make(chan struct{})
	f := &fake{lease: func(*proto.LeaseRequest) (*proto.LeaseResponse, error) {
		<-hang
		return nil, status.Error(codes.Unavailable, "")
	}}
	t.Cleanup(func() { close(hang) })
	r := newRig(t, f, 1)
	r.peers.cfg.Deadline, r.peers.pause = 50*time.Millisecond, longestPause
	for n := range mostFailures {
		r.look(key(1))
		if s := r.peers.Stats()[0]; s.Failures != uint64(n+1) {
			t.Fatalf("%+v after %d lookups, want as many failures", s, n+1)
		}
	}
	if s := r.peers.Stats()[0]; s.State != Alone {
		t.Errorf("the peer is %s, want it left alone", s.State)
	}
	if r.look(key(1)); r.peers.Stats()[0].Asks != mostFailures {
		t.Errorf("%d asks, want none of a peer that is left alone", r.peers.Stats()[0].Asks)
	}
	f.hangs.Store(true) // what no lookup waits for
	ends := func() time.Time {
		r.peer.mu.Lock()
		defer r.peer.mu.Unlock()
		return r.peer.until
	}
	due := func() {
		r.peer.mu.Lock()
		defer r.peer.mu.Unlock()
		r.peer.until = time.Now()
	}
	due()
	r.await("it is left alone for longer", func() bool { return time.Until(ends()) > 0 })
	if r.look(key(1)); r.peers.Stats()[0].Asks != mostFailures {
		t.Errorf("%d asks, want none of a peer that still does not answer", r.peers.Stats()[0].Asks)
	}
	f.hangs.Store(false)
	r.await("it is asked again", func() bool {
		due() // again, as a try that is under way makes the pause longer
		return r.peer.is(Here)
	})
}

// TestHostilePeers: whatever a peer sends, no read returns bytes that were not sent, or more than were asked for.
func TestHostilePeers(t *testing.T) {
	send := func(data ...int) func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		return func(_ *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
			for _, n := range data {
				if err := st.Send(&proto.FetchResponse{Data: make([]byte, n)}); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for name, c := range map[string]struct {
		fetch func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error
		want  error
	}{
		"all":      {send(4000, 4192), nil},
		"too few":  {send(4000), ErrAway},
		"none":     {send(), ErrAway},
		"too many": {send(4000, 4193), ErrMessage},
		"empty":    {send(0, 8192), ErrMessage},
		"a refusal": {func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
			return status.Error(codes.NotFound, "gone")
		}, ErrAway},
		"a stall": {func(_ *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
			<-st.Context().Done()
			return nil
		}, ErrAway},
		"a drip": {func(_ *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
			for st.Send(&proto.FetchResponse{Data: make([]byte, 1)}) == nil {
				time.Sleep(5 * time.Millisecond)
			}
			return nil
		}, ErrAway},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, &fake{lease: lend(pieceBytes), fetch: c.fetch}, 1)
			if name == "a drip" {
				r.peers.cfg.Budget = 100 * time.Millisecond
			}
			if n := r.look(key(1)); n != 1 {
				t.Fatalf("%d hits, want 1", n)
			}
			names := r.peers.fs.names()
			f, err := r.peers.fs.OpenFile(names[0], os.O_RDONLY, 0)
			testenv.OK(t, err)
			buf := make([]byte, 8192)
			n, err := f.ReadAt(buf, 4096)
			if c.want == nil && (n != len(buf) || err != nil) || c.want != nil && (n != 0 || !errors.Is(err, c.want)) {
				t.Errorf("%d bytes, %v, want %v", n, err, c.want)
			}
			if alone := r.peer.is(Alone); alone != errors.Is(err, errSilent) {
				t.Errorf("left alone: %v after %v, want that after one read without a byte", alone, err)
			}
			if name == "a stall" && !errors.Is(err, errSilent) {
				t.Errorf("the read ended by %v, want it cut off for its silence", err)
			}
			if name == "a drip" && !strings.Contains(err.Error(), "not all bytes in") && !strings.Contains(err.Error(), "no byte for") {
				t.Errorf("the read ended by %v, want it cut off for its slowness", err)
			}
		})
	}
}

// filesOf are a certificate for a name, its key, and the authority that its holder believes.
func filesOf(t *testing.T, by *certificates.Authority, name string, believes *certificates.Authority) (cert, key, ca string) {
	t.Helper()
	dir := t.TempDir()
	cert, key, ca = filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "ca")
	by.Pair(t, cert, key, name, x509.Certificate{})
	testenv.OK(t, os.WriteFile(ca, believes.PEM, 0o600))
	return cert, key, ca
}

// TestIdentities: hosts speak only to hosts with a certificate of their authority, for the name that the configuration has.
func TestIdentities(t *testing.T) {
	ours, other := certificates.New(t), certificates.New(t)
	for name, c := range map[string]struct {
		by, believes *certificates.Authority // of who calls
		server       string                  // the name in the certificate of who is called
		plain        bool
		want         bool
	}{
		"ours":                       {ours, ours, "127.0.0.1", false, true},
		"a caller of another":        {other, ours, "127.0.0.1", false, false},
		"a server of another":        {ours, other, "127.0.0.1", false, false},
		"a server of another's name": {ours, ours, "elsewhere", false, false},
		"plaintext":                  {ours, ours, "127.0.0.1", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := Config{Listen: "127.0.0.1:0"}
			a.Cert, a.Key, a.CA = filesOf(t, ours, c.server, ours)
			lends, err := New(a)
			testenv.OK(t, err)
			started(t, lends)
			b := Config{Hosts: []string{lends.Addr()}}
			if !c.plain {
				b.Cert, b.Key, b.CA = filesOf(t, c.by, "127.0.0.1", c.believes)
			}
			calls, err := New(b)
			testenv.OK(t, err)
			t.Cleanup(func() { testenv.NoError(t, errors.Join(calls.Close(), calls.CloseFiles())) })
			if _, err := calls.Try(t.Context(), lends.Addr()); (err == nil) != c.want {
				t.Errorf("%v, want an answer: %v", err, c.want)
			}
		})
	}
}

// TestTrustIsOfAName: a certificate that a host has shown as a client is not one for the name of another host.
func TestTrustIsOfAName(t *testing.T) {
	a := certificates.New(t)
	cert, key, ca := filesOf(t, a, "one.example.org", a)
	id, err := newIdentity(cert, key, ca, slog.New(slog.DiscardHandler))
	testenv.OK(t, err)
	chain := []*x509.Certificate{id.Now().pair.Leaf}
	for _, c := range []struct {
		name string
		good bool
	}{{"", true}, {"two.example.org", false}, {"one.example.org", true}, {"two.example.org", false}} {
		if err := id.verify(chain, c.name); (err == nil) != c.good {
			t.Errorf("for the name %q: %v, want it good: %v", c.name, err, c.good)
		}
	}
}

// TestNameOfAnother: a peer that says it is a host which another address leads to keeps nothing from that one, unless its certificate is for
// both addresses.
func TestNameOfAnother(t *testing.T) {
	a := certificates.New(t)
	var hosts []string
	for _, ip := range []string{"127.0.0.1", "127.0.0.2"} {
		cert, key, _ := filesOf(t, a, ip, a)
		pair, err := tls.LoadX509KeyPair(cert, key)
		testenv.OK(t, err)
		l, err := net.Listen("tcp", ip+":0")
		testenv.OK(t, err)
		g := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}})))
		proto.RegisterPeerServiceServer(g, &fake{id: 9})
		go func() { _ = g.Serve(l) }()
		t.Cleanup(g.Stop)
		hosts = append(hosts, l.Addr().String())
	}
	c := Config{Hosts: hosts}
	c.Cert, c.Key, c.CA = filesOf(t, a, "127.0.0.3", a)
	p, err := New(c)
	testenv.OK(t, err)
	started(t, p)
	r := &rig{T: t, peers: p}
	r.await("an answer of both", func() bool {
		list := p.Stats() // once: peers appear while their names are resolved
		return len(list) == len(hosts) && !slices.ContainsFunc(list, func(x Stats) bool { return x.State == Away })
	})
	named := 0
	for _, x := range p.all() {
		if s := x.is(Here); !s {
			t.Errorf("%s is not asked, want that it is", x.addr)
		}
		if x.agent() != "" {
			named++
		}
	}
	if named != 1 {
		t.Errorf("%d of them have the host's name for NIXL, want one", named)
	}
}

// TestLongMetadata: a peer that says more of its agent than an agent has to say is not one.
func TestLongMetadata(t *testing.T) {
	newRig(t, &fake{nixl: make([]byte, mostMetadata)}) // it is here
	p, err := New(Config{Hosts: []string{(&fake{nixl: make([]byte, mostMetadata+1)}).serve(t)}})
	testenv.OK(t, err)
	started(t, p)
	r := &rig{T: t, peers: p}
	r.await("what is wrong with it", func() bool {
		s := p.Stats()
		return len(s) == 1 && s[0].State == Away && strings.Contains(s[0].Reason, "metadata")
	})
}

// TestAuthorityRenewed: the authority of running hosts changes in steps, and they do not lose each other. Once one authority does not count
// any more, a connection that it was good for ends, on either side.
func TestAuthorityRenewed(t *testing.T) {
	old, next := certificates.New(t), certificates.New(t)
	both := &certificates.Authority{PEM: slices.Concat(old.PEM, next.PEM)}
	var sides [2]Config // who lends, and who calls
	set := func(side int, by, believes *certificates.Authority) {
		cert, key, ca := filesOf(t, by, "127.0.0.1", believes)
		c := &sides[side]
		for at, from := range map[*string]string{&c.Cert: cert, &c.Key: key, &c.CA: ca} {
			if *at == "" {
				*at = from
			} else { // a new file in the place of the old one, as old
				was, err := os.Stat(*at)
				testenv.OK(t, err)
				testenv.OK(t, os.Chtimes(from, was.ModTime(), was.ModTime()))
				testenv.OK(t, os.Rename(from, *at))
			}
		}
	}
	set(0, old, old)
	set(1, old, old)
	sides[0].Listen = "127.0.0.1:0"
	var hosts [2]*Peers
	for i := range sides {
		if i == 1 {
			sides[1].Hosts = []string{hosts[0].Addr()}
		}
		p, err := New(sides[i])
		testenv.OK(t, err)
		hosts[i] = p
		started(t, p)
	}
	r := &rig{T: t, peers: hosts[1]}
	is := func(want State) func() bool {
		return func() bool { s := hosts[1].Stats(); return len(s) == 1 && s[0].State == want }
	}
	r.await("the peer is here", is(Here))
	heard := hosts[1].all()[0]
	answers := func(step string) {
		t.Helper()
		if _, err := hosts[1].Try(t.Context(), hosts[0].Addr()); err != nil || !heard.is(Here) {
			t.Errorf("%s: %v, and the peer is %s, want an answer and it here", step, err, hosts[1].Stats()[0].State)
		}
	}
	set(0, old, both)
	set(1, old, both)
	answers("both count")
	set(0, next, both)
	answers("the lender's is of the new one")
	set(1, next, both)
	answers("the caller's is, too")
	// Their connections are of the old one still.
	line, err := hosts[1].dial(hosts[0].Addr(), hosts[0].Addr())
	testenv.OK(t, err)
	defer line.Close()
	calls := func(want codes.Code) {
		t.Helper()
		c := proto.NewPeerServiceClient(line)
		_, err := c.Renew(t.Context(), &proto.RenewRequest{Lease: 1})
		if status.Code(err) != want {
			t.Errorf("a call: %v, want %v", err, want)
		}
		st, err := c.Fetch(t.Context(), &proto.FetchRequest{Lease: 1})
		testenv.OK(t, err)
		if _, err := st.Recv(); status.Code(err) != want {
			t.Errorf("a call of a stream: %v, want %v", err, want)
		}
	}
	set(1, old, both)
	calls(codes.NotFound)
	set(1, next, both)
	set(0, next, next)
	calls(codes.PermissionDenied)
	r.await("the lender has ended it", func() bool { return hosts[1].Stats()[0].Reason != "" })
	r.await("the caller is back with the new one's", is(Here))
	set(1, old, both)
	set(0, old, both)
	r.peers.all()[0].hangUp()
	r.await("they speak with the old one's again", func() bool { return is(Here)() && r.peers.all()[0].signedBy(old.Certificate) })
	set(1, next, next)
	r.await("the caller has ended it", is(Away))
	set(0, next, both)
	r.await("the lender is back with the new one's", is(Here))
}

// signedBy says whether the peer's certificate is of an authority.
func (x *peer) signedBy(a *x509.Certificate) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.chain != nil && x.chain[0].CheckSignatureFrom(a) == nil
}

// TestPlaintext: without certificates only loopback addresses are listened on and called.
func TestPlaintext(t *testing.T) {
	if _, err := New(Config{Listen: "0.0.0.0:0"}); !errors.Is(err, ErrPlaintext) {
		t.Errorf("listening on all interfaces without TLS: %v, want %v", err, ErrPlaintext)
	}
	p, err := New(Config{Hosts: []string{"192.0.2.1:9477"}})
	testenv.OK(t, err)
	t.Cleanup(func() { testenv.NoError(t, errors.Join(p.Close(), p.CloseFiles())) })
	if p.settle(); len(p.all()) != 0 || !errors.Is(p.lost["192.0.2.1:9477"], ErrPlaintext) {
		t.Errorf("%d peers, %v, want none and %v", len(p.all()), p.lost, ErrPlaintext)
	}
}

// TestPace: bytes are spread over time, and what would wait too long is refused.
func TestPace(t *testing.T) {
	p := pace{rate: 1 << 20}
	for range 2 {
		testenv.OK(t, p.wait(t.Context(), 1, longestWait))
	}
	p.free = time.Now().Add(2 * longestWait)
	if err := p.wait(t.Context(), 1, longestWait); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v, want it refused", err)
	}
	if p.behind() < longestWait {
		t.Errorf("it is %s behind, want more than %s", p.behind(), longestWait)
	}
}

// TestSelfAndTwin: an address that leads to this host is not asked, and of two that lead to one host one is.
func TestSelfAndTwin(t *testing.T) {
	g := grpc.NewServer()
	proto.RegisterPeerServiceServer(g, &fake{})
	t.Cleanup(g.Stop)
	var hosts []string
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		testenv.OK(t, err)
		hosts = append(hosts, l.Addr().String())
		go func() { _ = g.Serve(l) }()
	}
	p, err := New(Config{Listen: "127.0.0.1:0"})
	testenv.OK(t, err)
	p.cfg.Hosts = append(hosts, p.Addr())
	started(t, p)
	r := &rig{T: t, peers: p}
	r.await("one is asked, one is its twin, and one is this host", func() bool {
		count := map[State]int{}
		for _, s := range p.Stats() {
			count[s.State]++
			if s.State == Self && s.Address != p.Addr() {
				t.Fatalf("%s is taken for this host", s.Address)
			}
		}
		return count[Here] == 1 && count[Twin] == 1 && count[Self] == 1
	})
}
