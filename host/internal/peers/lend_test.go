package peers

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
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
	peers *Peers
	ask   *proto.LeaseRequest
	store *store.Store
	disk  *faultfs.FS
	put   func(n byte)
}

func newLender(t *testing.T) *lender { return newLenderWith(t, Config{}) }

// newLenderWith is a lender with roots of so many bytes, one of a MiB if none is named.
func newLenderWith(t *testing.T, c Config, roots ...int64) *lender {
	t.Helper()
	return newLenderOf(t, c, store.Config{}, roots...)
}

// givesUp is of a store that gives an operation up while a test waits for that.
var givesUp = store.Config{IOTimeout: time.Second}

func newLenderOf(t *testing.T, c Config, of store.Config, roots ...int64) *lender {
	t.Helper()
	l := &lender{disk: faultfs.New(staging.OS())}
	c.Listen = "127.0.0.1:0"
	p, err := New(c)
	testenv.OK(t, err)
	if len(roots) == 0 {
		roots = []int64{1 << 20}
	}
	for _, n := range roots {
		of.Roots = append(of.Roots, store.RootConfig{Path: t.TempDir(), Capacity: n, Medium: store.Medium{FS: l.disk}})
	}
	of.Roots = append(of.Roots, p.Root(1))
	l.store, err = store.Open(t.Context(), of)
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
	l.service, l.peers = service{p.lending, &p.offers}, p
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
	l.shares.isFree(t, "without leases")
}

// certified is the context of a call with a certificate, from any address but those that tests have peers of the configuration at.
func certified(t *testing.T, n byte) context.Context {
	c, _ := grpcpeer.FromContext(calledBy(t, byte(rand.Uint32N(250))))
	c.AuthInfo = credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Raw: []byte{n}}}}}
	return grpcpeer.NewContext(t.Context(), c)
}

// TestPinsOfOne: a caller that leases all it finds, again and again before it gives anything back, leaves another as much of each root as it has, and a
// peer of the configuration its part, whatever crowds have.
func TestPinsOfOne(t *testing.T) {
	const room = 120
	for who, by := range map[string]func(*testing.T, byte) context.Context{"addresses": calledBy, "certificates": certified} {
		for _, roots := range []int64{1, 3} {
			t.Run(fmt.Sprintf("%s and %d roots", who, roots), func(t *testing.T) {
				l := newLenderWith(t, Config{}, slices.Repeat([]int64{room / roots * pieceBytes}, int(roots))...)
				const chunks = room - 12 // with what there is besides pages
				for n := range byte(chunks - 1) {
					l.put(n + 2)
				}
				most := 0
				for _, r := range l.store.Stats().Roots {
					most += int(r.Entries) / 2
				}
				// takes is what a caller has of the keys, one after the other, if its leases of before end then.
				held := map[byte][]uint64{}
				takes := func(ctx context.Context, who byte, from, to int) (keys []byte) {
					before := held[who]
					held[who] = nil
					for n := from; n < to; n++ {
						k := key(byte(n + 1))
						l.ask.Keys = k[:]
						r, err := l.Lease(ctx, l.ask)
						testenv.OK(t, err)
						if len(r.GetEntries()) > 0 {
							keys, held[who] = append(keys, byte(n+1)), append(held[who], r.GetLease())
							_, err := l.Renew(ctx, &proto.RenewRequest{Lease: r.GetLease(), Time: durationpb.New(time.Minute)})
							testenv.OK(t, err)
						}
					}
					for _, n := range before {
						_, err := l.Return(ctx, &proto.ReturnRequest{Lease: n})
						testenv.OK(t, err)
					}
					return keys
				}
				greedy := takes(by(t, 1), 1, 0, chunks)
				for range 3 {
					greedy = takes(by(t, 1), 1, 0, chunks)
				}
				others := 0
				for n := range chunks {
					if k := byte(n + 1); !slices.Contains(greedy, k) {
						others += len(takes(by(t, 2), 2+k, n, n+1))
					}
				}
				if n := len(greedy); n < most/2-int(roots) || n > most/2+int(roots) || others < most/4-int(roots) {
					t.Errorf("%d entries are lent to one that takes all, %d others to the next, want half of %d and half of that", n, others, most)
				}
				for n := range held {
					takes(by(t, n), n, 0, 0)
				}
				if n := len(takes(by(t, 2), 2, 0, chunks)); n < most/2-int(roots) {
					t.Errorf("%d entries are lent to one after another has given all back, want half of %d", n, most)
				}

				l.owner.addresses.Store(&map[string]bool{"10.0.0.250": true, "10.0.0.251": true})
				l.shares.expect(2)
				var crowd []byte
				for n := range byte(20) {
					crowd = append(crowd, takes(by(t, n), n, 0, chunks)...)
				}
				known := slices.DeleteFunc(takes(calledBy(t, 250), 250, 0, chunks), func(k byte) bool { return slices.Contains(crowd, k) })
				if n := len(known); n < most/8-int(roots) {
					t.Errorf("%d entries that a crowd does not have are lent to one of two peers of the configuration, want an eighth of %d", n, most)
				}
				for n := range held {
					takes(by(t, n), n, 0, 0)
				}
				l.shares.isFree(t, "without leases")
			})
		}
	}
}

// TestPeerThatCameFirst: a connection is that of a peer once its address is known for one, also where it was made before.
func TestPeerThatCameFirst(t *testing.T) {
	l := newLender(t)
	c, _ := grpcpeer.FromContext(calledBy(t, 1))
	c.AuthInfo = &line{who: l.owner.callerAt(c.Addr, nil)}
	ctx := grpcpeer.NewContext(t.Context(), c)
	for _, known := range []bool{false, true} {
		l.owner.addresses.Store(&map[string]bool{"10.0.0.1": known})
		if who := l.owner.callerOf(ctx); who != (caller{"10.0.0.1", known}) {
			t.Errorf("%+v calls where a peer's address is known: %v", who, known)
		}
	}
}

// TestQuestionsOfOne: of a caller's questions so many are looked up at a time, whatever it asks at once.
func TestQuestionsOfOne(t *testing.T) {
	l := newLender(t)
	l.asks.most = 1
	l.disk.Set(faultfs.Rule{Op: staging.OpOpen, Path: "**", Fault: faultfs.Fault{Hang: true}})
	var calls sync.WaitGroup
	ask := func(ctx context.Context) { calls.Go(func() { _, _ = l.Lease(ctx, l.ask) }) }
	ask(calledBy(t, 1))
	testenv.OK(t, l.disk.AwaitHanging(testenv.Context(t), 1))
	var waits atomic.Bool
	ask(noticed{calledBy(t, 1), func() { waits.Store(true) }})
	testenv.Until(t, "a second question", func() bool { return waits.Load() || l.disk.Hanging() > 1 })
	if n := l.disk.Hanging(); n != 1 {
		t.Errorf("%d questions of one caller are looked up, want 1 until that is over", n)
	}
	ask(calledBy(t, 2))
	testenv.OK(t, l.disk.AwaitHanging(testenv.Context(t), 2))
	l.disk.Release()
	calls.Wait()
	testenv.Until(t, "no caller is known when all calls and their rests are over", func() bool {
		l.asks.mu.Lock()
		defer l.asks.mu.Unlock()
		return len(l.asks.of) == 0
	})
}

// TestListsOfOne: one caller that lists all entries again and again has one made at a time, and a stream that goes on holds no turn.
func TestListsOfOne(t *testing.T) {
	l := newLender(t)
	l.asks.most = 1
	client := func(n int) proto.PeerServiceClient {
		c, err := grpc.NewClient("passthrough:///"+l.peers.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				return dialFrom(t, fmt.Sprint("127.0.0.", n), l.peers.Addr()), nil
			}))
		testenv.OK(t, err)
		t.Cleanup(func() { testenv.NoError(t, c.Close()) })
		return proto.NewPeerServiceClient(c)
	}
	lists := func(n int) chan error {
		over := make(chan error, 1)
		st, err := client(n).Residents(testenv.Context(t), &proto.ResidentsRequest{})
		testenv.OK(t, err)
		go func() { _, err := st.Recv(); over <- err }()
		return over
	}
	leave, err := l.asks.enter(t.Context(), caller{"127.0.0.1", false})
	testenv.OK(t, err)
	waits := lists(1)
	testenv.Until(t, "a list that waits", func() bool {
		l.asks.mu.Lock()
		defer l.asks.mu.Unlock()
		x := l.asks.of[caller{"127.0.0.1", false}]
		return x != nil && x.calls == 2
	})
	testenv.OK(t, <-lists(2))
	select {
	case err := <-waits:
		t.Errorf("a second list of one caller has come (%v), want that it waits", err)
	default:
	}
	leave()
	testenv.OK(t, <-waits)
	testenv.Until(t, "no turn is taken", func() bool {
		l.asks.mu.Lock()
		defer l.asks.mu.Unlock()
		return len(l.asks.of) == 0
	})
}

// TestTurnsRest: a caller that has calls waiting has a part of its turn's time, by how long they take. One that has not waits for nothing.
func TestTurnsRest(t *testing.T) {
	const takes, want = time.Millisecond, 25
	limited := &turns{rest: 3}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer stop()
		var calls sync.WaitGroup
		var busy atomic.Int64
		for range 8 {
			calls.Go(func() {
				for ctx.Err() == nil {
					if leave, err := limited.enter(ctx, caller{"1", false}); err == nil {
						busy.Add(1)
						time.Sleep(takes)
						leave()
					}
				}
			})
		}
		since := time.Now()
		for range 25 {
			leave, err := limited.enter(ctx, caller{"2", false})
			testenv.OK(t, err)
			time.Sleep(takes)
			leave()
		}
		if d := time.Since(since); d != 25*takes {
			t.Errorf("25 calls, one after the other, have taken %s, want %s", d, 25*takes)
		}
		calls.Wait()
		synctest.Wait()
		if n := busy.Load(); n < want || n > want+2 {
			t.Errorf("%d calls of one that has others waiting, want %d", n, want)
		}
		time.Sleep(time.Second)
		if n := callersOf(limited); n != 0 {
			t.Errorf("%d callers are known after all calls, want none", n)
		}
	})
}

// TestTurnsOfACrowd: callers that are not of the configuration have as much together however many they are, and one that is of it as much as alone.
func TestTurnsOfACrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys = int((time.Millisecond - askTime) / keyTime)
		each, all := &turns{rest: 3}, &crowd{Queue: arrivals.Queue{Most: 2}, rest: 3}
		ctx, stop := context.WithTimeout(t.Context(), 600*time.Millisecond)
		defer stop()
		var calls sync.WaitGroup
		var asked [2]atomic.Int64 // of strangers, of a peer
		for n := range 80 {
			who, of := caller{fmt.Sprint(n / 4), n/4 == 0}, 0
			if who.known {
				of = 1
			}
			calls.Go(func() {
				for ctx.Err() == nil {
					if leave, err := each.enterAmong(ctx, all, who, keys); err == nil {
						asked[of].Add(1)
						time.Sleep(time.Millisecond)
						leave()
					}
				}
			})
		}
		time.Sleep(45 * time.Millisecond) // until each of them has asked once
		waited := time.Duration(0)
		for range 40 {
			time.Sleep(8 * time.Millisecond)
			since := time.Now()
			leave, err := each.enterAmong(t.Context(), all, caller{"seldom", false}, keys)
			testenv.OK(t, err)
			waited += time.Since(since)
			leave()
		}
		if waited > 40*4*time.Millisecond {
			t.Errorf("one of the crowd that seldom asks has waited %s in 40 calls, want at most a call and its rest for each", waited)
		}
		calls.Wait()
		if s, p := asked[0].Load(), asked[1].Load(); s < 200 || s > 310 || p < 150 || p > 155 {
			t.Errorf("%d calls of a crowd and %d of a peer, want 200 to 310 and 150", s, p)
		}
		time.Sleep(10 * time.Second)
		if n := callersOf(each); n != 0 || all.Waits() {
			t.Errorf("%d callers are known after all calls, and one waits: %t, want none", n, all.Waits())
		}
	})
}

// TestRestOfACallThatWaited: a crowd's rest is by what a call of its keys can take. While the call waited for a processor it has taken
// nothing.
func TestRestOfACallThatWaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys = int((time.Millisecond - askTime) / keyTime)
		each, all := &turns{rest: 3}, &crowd{rest: 3}
		leave, err := each.enterAmong(t.Context(), all, caller{"held up", false}, keys)
		testenv.OK(t, err)
		over := make(chan time.Time)
		go func() {
			leave, err := each.enterAmong(t.Context(), all, caller{"another", false}, keys)
			testenv.OK(t, err)
			over <- time.Now()
			leave()
		}()
		time.Sleep(100 * time.Millisecond)
		since := time.Now()
		leave()
		if d := (<-over).Sub(since); d != 3*time.Millisecond {
			t.Errorf("another of the crowd has waited %s after a call that was held up for 100 ms, want the rest of one that takes 1 ms", d)
		}
	})
}

func callersOf(t *turns) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.of)
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
	l.shares.isFree(t, "after all calls")
}

// noticed is a context that says when it is waited for.
type noticed struct {
	context.Context
	waits func()
}

func (c noticed) Done() <-chan struct{} {
	c.waits()
	return c.Context.Done()
}

// TestFetchesThatWait: a call that waits for a buffer has no file open, so it keeps no entry in its root.
func TestFetchesThatWait(t *testing.T) {
	l := newLender(t)
	l.put(2)
	two := key(2)
	sends, let := make(chan struct{}, buffers), make(chan struct{})
	var calls sync.WaitGroup
	fetch := func(ctx context.Context, keys []byte, want codes.Code) (lease uint64) {
		l.ask.Keys = keys
		r, err := l.Lease(ctx, l.ask)
		testenv.OK(t, err)
		calls.Go(func() {
			err := l.Fetch(&proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes}, &stuck{sink{ctx: ctx}, sends, let})
			if status.Code(err) != want {
				t.Errorf("%v of a call, want %v", err, want)
			}
		})
		return r.GetLease()
	}
	for range buffers / 2 {
		fetch(calledBy(t, 1), l.ask.Keys, codes.OK)
		<-sends
	}
	waits, open := make(chan struct{}), l.disk.Open()
	lease := fetch(noticed{calledBy(t, 1), sync.OnceFunc(func() { close(waits) })}, two[:], codes.NotFound)
	<-waits
	_, err := l.Return(t.Context(), &proto.ReturnRequest{Lease: lease})
	testenv.OK(t, err)
	if n := l.disk.Open(); n != open {
		t.Errorf("%d files are open with a call that waits, want the %d of those that send", n, open)
	}
	close(let)
	calls.Wait()
}

// TestTurns: callers have the same part of the bandwidth, however many calls one has, and nothing of those is left.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rounds, rate = 100, 10 * part
		p := &pace{rate: rate}
		ctx, stop := context.WithCancel(t.Context())
		var calls sync.WaitGroup
		var sent [2]atomic.Int64
		for n := range 2 * buffers {
			who := min(n, 1) // the first call is of one, all others are of another
			calls.Go(func() {
				for ctx.Err() == nil {
					if p.waitOf(ctx, caller{id: string(rune('a' + who))}, part) == nil {
						sent[who].Add(1)
					} else {
						time.Sleep(time.Millisecond)
					}
				}
			})
		}
		time.Sleep(rounds * 2 * time.Second * part / rate)
		stop()
		calls.Wait()
		if one, many := sent[0].Load(), sent[1].Load(); one < rounds*9/10 || many > rounds*11/10 {
			t.Errorf("one call has sent %d parts of %d beside one caller's many that have sent %d, want half", one, 2*rounds, many)
		}
		if n := callersOf(&p.turns); n != 0 {
			t.Errorf("%d turns are kept after all calls, want none", n)
		}
	})
}

// TestHungRead: a buffer that a read still uses, which was given up, is not used for another.
func TestHungRead(t *testing.T) {
	l := newLenderOf(t, Config{}, givesUp)
	r, err := l.Lease(t.Context(), l.ask)
	testenv.OK(t, err)
	l.disk.Set(faultfs.Rule{Op: staging.OpRead, Path: "**", Fault: faultfs.Fault{Hang: true}})
	over := make(chan error, 1)
	go func() {
		over <- l.Fetch(&proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes}, &sink{ctx: t.Context()})
	}()
	testenv.OK(t, l.disk.AwaitHanging(testenv.Context(t), 1))
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
