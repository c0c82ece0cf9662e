package peers

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// lender is a host that lends one entry.
type lender struct {
	service
	ask   *proto.LeaseRequest
	store *store.Store
	disk  *faultfs.FS
	put   func(n byte)
}

func newLender(t *testing.T) *lender { return newLenderWith(t, Config{}) }

func newLenderWith(t *testing.T, c Config) *lender {
	l := &lender{disk: faultfs.New(staging.OS())}
	c.Listen = "127.0.0.1:0"
	p, err := New(c)
	testenv.OK(t, err)
	l.store, err = store.Open(t.Context(), store.Config{IOTimeout: time.Second,
		Roots: []store.RootConfig{{Path: t.TempDir(), Capacity: 1 << 20, Medium: store.Medium{FS: l.disk}}, p.Root(1)}})
	testenv.OK(t, err)
	p.Start(l.store)
	t.Cleanup(func() {
		l.disk.Release()
		testenv.NoError(t, errors.Join(p.Close(), l.store.Close(), p.CloseFiles()))
	})
	ns := space()
	space, err := l.store.Namespace(t.Context(), ns)
	testenv.OK(t, err)
	pool, err := staging.NewSlots(1, 1<<20)
	testenv.OK(t, err)
	t.Cleanup(func() { testenv.NoError(t, pool.Close()) })
	l.put = func(n byte) {
		put, err := l.store.Put(t.Context(), store.PutRequest{Namespace: space, Key: key(n)})
		testenv.OK(t, err)
		testenv.OK(t, storetest.StorePut(t.Context(), pool, put, make([]byte, put.Plan().PayloadBytes())))
	}
	l.put(1)
	digest, k := ns.Digest(), key(1)
	l.ask = &proto.LeaseRequest{NamespaceDigest: digest[:], Keys: k[:], Ranks: 1, Leading: true, Time: durationpb.New(time.Minute)}
	l.service = service{lending: p.lending}
	return l
}

// late is a context that ends after it was looked at so many times.
type late struct {
	context.Context
	looks int
}

func (c *late) Err() error {
	if c.looks--; c.looks < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

// TestLateLease: a lease that was made too late for who has asked is not kept.
func TestLateLease(t *testing.T) {
	l := newLender(t)
	for looks := range 2 {
		if r, err := l.Lease(&late{t.Context(), looks}, l.ask); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%v, %v for a call that is over after %d looks, want its deadline", r, err, looks)
		}
	}
	if n := l.held(); n != 0 {
		t.Errorf("%d leases are held that nothing will give back, want none", n)
	}
}

// TestLeaseNumbers: a number that a peer was not given names no lease, nor does one of an earlier run.
func TestLeaseNumbers(t *testing.T) {
	l := newLender(t)
	given := map[uint64]bool{}
	for range 8 {
		r, err := l.Lease(t.Context(), l.ask)
		testenv.OK(t, err)
		given[r.GetLease()] = true
	}
	for n := range given {
		for _, other := range []uint64{n - 1, n + 1} {
			if given[other] {
				t.Errorf("the leases %d and %d: who has one can tell the other", n, other)
			}
		}
	}
	for n := range uint64(100) {
		_, err := l.Return(t.Context(), &proto.ReturnRequest{Lease: n})
		testenv.OK(t, err)
	}
	if n := l.held(); n != len(given) {
		t.Errorf("%d leases are held after others' were given back, want %d", n, len(given))
	}
}

// calledBy is the context of a call from an address.
func calledBy(t *testing.T, last byte) context.Context {
	return grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, last), Port: int(rand.Uint32N(1 << 16))}})
}

// TestLeasesKeys: leases have so many keys together, whoever asks for how few entries how often, and a peer leaves as many as it has.
func TestLeasesKeys(t *testing.T) {
	l := newLender(t)
	const keys = 64
	l.shares.most[leasedKeys] = 8 * keys
	l.ask.Leading, l.ask.Keys = false, append(l.ask.Keys, bytes.Repeat([]byte{9}, (keys-1)*kv.KeyBytes)...)
	granted := func(who byte) (n int) {
		for n <= 8 {
			if _, err := l.Lease(calledBy(t, who), l.ask); status.Code(err) == codes.ResourceExhausted {
				return n
			} else {
				testenv.OK(t, err)
			}
			n++
		}
		return n
	}
	for _, want := range []int{4, 2, 1, 0} {
		if n := granted(byte(want)); n != want {
			t.Errorf("%d leases of the next peer, want %d: half of what others leave", n, want)
		}
	}
	l.end(func(x *lent) bool { return x.who.id == "10.0.0.4" })
	if n := granted(0); n != 2 {
		t.Errorf("%d leases after 4 were given back, want 2", n)
	}
}

// TestLeasesOfOne: half of all leases is the most that one peer may have.
func TestLeasesOfOne(t *testing.T) {
	l := newLender(t)
	l.shares.most[leases] = 64
	for n := range 33 {
		_, err := l.Lease(calledBy(t, 1), l.ask)
		if refused := status.Code(err) == codes.ResourceExhausted; refused != (n == 32) {
			t.Fatalf("lease %d of one peer: %v", n, err)
		}
	}
	if _, err := l.Lease(calledBy(t, 2), l.ask); err != nil {
		t.Errorf("%v for another peer, want a lease", err)
	}
	l.end(func(*lent) bool { return true })
	if len(l.shares.of) != 0 || l.shares.held != [resources]int{} {
		t.Errorf("%v is counted without leases, want nothing", l.shares.held)
	}
}

// TestRenew: a lease that is renewed lasts longer, and one that is over does not begin again.
func TestRenew(t *testing.T) {
	l := newLender(t)
	l.ask.Time = durationpb.New(0) // the shortest
	r, err := l.Lease(t.Context(), l.ask)
	testenv.OK(t, err)
	renewed, err := l.Renew(t.Context(), &proto.RenewRequest{Lease: r.GetLease(), Time: durationpb.New(time.Minute)})
	testenv.OK(t, err)
	if got := renewed.GetTime().AsDuration(); got != time.Minute {
		t.Errorf("renewed for %s, want a minute", got)
	}
	soon := time.Now().Add(10 * time.Second)
	l.end(func(x *lent) bool { return soon.After(x.ends) })
	if n := l.held(); n != 1 {
		t.Errorf("%d leases are held, want the one that was renewed", n)
	}
	l.end(func(*lent) bool { return true })
	if _, err := l.Renew(t.Context(), &proto.RenewRequest{Lease: r.GetLease()}); status.Code(err) != codes.NotFound {
		t.Errorf("%v for a lease that is over, want %v", err, codes.NotFound)
	}
}

// TestBusy: what is there, and not lent because others have half of the root, is not said to be gone.
func TestBusy(t *testing.T) {
	l := newLender(t)
	const chunks = 24 // nearly all that the root has room for
	for n := range byte(chunks - 1) {
		l.put(n + 2)
		k := key(n + 2)
		l.ask.Keys = append(l.ask.Keys, k[:]...)
	}
	absent := key(99)
	for _, c := range []struct {
		keys []byte
		some bool
		busy bool
	}{{absent[:], false, false}, {l.ask.Keys[:kv.KeyBytes], true, false}, {l.ask.Keys, true, true}, {l.ask.Keys[(chunks-1)*kv.KeyBytes:], false, true}} {
		l.ask.Keys = c.keys
		r, err := l.Lease(t.Context(), l.ask)
		testenv.OK(t, err)
		if n := len(r.GetEntries()); n > 0 != c.some || c.busy && n == chunks || r.GetBusy() != c.busy {
			t.Errorf("%d entries of %d, busy: %v, want some: %v, busy: %v", n, len(c.keys)/kv.KeyBytes, r.GetBusy(), c.some, c.busy)
		}
	}
}

// sink is the end of a Fetch that takes everything.
type sink struct {
	grpc.ServerStream
	ctx  context.Context
	data []byte
}

func (s *sink) Context() context.Context { return s.ctx }
func (s *sink) Send(m *proto.FetchResponse) error {
	s.data = append(s.data, m.GetData()...)
	return nil
}

// stuck is the end of a Fetch that takes nothing until it is let go.
type stuck struct {
	sink
	sends chan<- struct{}
	let   <-chan struct{}
}

func (s *stuck) Send(*proto.FetchResponse) error {
	s.sends <- struct{}{}
	<-s.let
	return nil
}

// TestFetchesOfOne: a peer that does not take what it fetches leaves buffers for others.
func TestFetchesOfOne(t *testing.T) {
	l := newLender(t)
	r, err := l.Lease(calledBy(t, 1), l.ask)
	testenv.OK(t, err)
	q := &proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes}
	sends, let := make(chan struct{}, 2*buffers), make(chan struct{})
	var calls sync.WaitGroup
	for range 2 * buffers {
		calls.Go(func() {
			if err := l.Fetch(q, &stuck{sink{ctx: calledBy(t, 1)}, sends, let}); err != nil {
				t.Error(err)
			}
		})
	}
	for range buffers / 2 {
		<-sends
	}
	select {
	case <-sends:
		t.Errorf("one peer has more than %d of %d buffers", buffers/2, buffers)
	case <-time.After(100 * time.Millisecond): // broken code has them by then
		other := &sink{ctx: calledBy(t, 2)}
		testenv.OK(t, l.Fetch(q, other))
		if len(other.data) != pageBytes {
			t.Errorf("another peer has got %d bytes, want %d", len(other.data), pageBytes)
		}
	}
	close(let)
	calls.Wait()
	_, err = l.Return(t.Context(), &proto.ReturnRequest{Lease: r.GetLease()})
	testenv.OK(t, err)
	if n := len(l.shares.of); n != 0 {
		t.Errorf("%d callers are known after all calls, want none", n)
	}
}

// TestHungRead: a buffer that a read still uses, which was given up, is not used for another.
func TestHungRead(t *testing.T) {
	l := newLender(t)
	r, err := l.Lease(t.Context(), l.ask)
	testenv.OK(t, err)
	l.disk.Set(faultfs.Rule{Op: staging.OpRead, Path: "**", Fault: faultfs.Fault{Hang: true}})
	over := make(chan error, 1)
	go func() {
		over <- l.Fetch(&proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes}, &sink{ctx: t.Context()})
	}()
	testenv.OK(t, l.disk.AwaitHanging(t.Context(), 1))
	testenv.Until(t, "a root out of service", func() bool { return l.store.Stats().Roots[0].State != health.In })
	select {
	case err := <-over:
		t.Fatalf("the call has given its buffer back while the read still uses it: %v", err)
	case <-time.After(100 * time.Millisecond): // broken code is done by then
	}
	if n := len(l.free); n != buffers-1 {
		t.Errorf("%d buffers are free while a read hangs, want %d", n, buffers-1)
	}
	l.disk.Release()
	if err := <-over; status.Code(err) != codes.DataLoss {
		t.Errorf("%v, want the read to fail", err)
	}
	if n := len(l.free); n != buffers {
		t.Errorf("%d buffers are free after the read has ended, want %d", n, buffers)
	}
}

// held is how many leases this host has lent at present.
func (l *lending) held() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.leases)
}
