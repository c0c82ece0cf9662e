package peers

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// attacker is a caller that takes all that it gets of one thing, and goes on until the test ends.
type attacker struct {
	*testing.T
	*lender
	calls []proto.PeerServiceClient // each by a connection
	over  context.Context
	work  sync.WaitGroup
}

// from is a caller at an address of this machine.
func (l *lender) from(t *testing.T, address string) proto.PeerServiceClient {
	to := l.owner.Addr()
	c, err := grpc.NewClient("passthrough:///"+to, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialFrom(t, address, to), nil }))
	testenv.OK(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return proto.NewPeerServiceClient(c)
}

func (a *attacker) lease(n int, keys ...kv.Key) (*proto.LeaseResponse, error) {
	q := &proto.LeaseRequest{NamespaceDigest: a.ask.GetNamespaceDigest(), Ranks: 1, Time: durationpb.New(time.Minute)}
	for _, k := range keys {
		q.Keys = append(q.Keys, k[:]...)
	}
	return a.calls[n%len(a.calls)].Lease(a.over, q)
}

// mutes are connections that call and do not read.
func (a *attacker) mutes(connections int, call func(*mute) bool) {
	for range connections {
		m := newMute(a.T, "127.0.0.3", a.owner.Addr())
		for range 2 * mostStreams {
			if call == nil || !call(m) {
				break
			}
		}
	}
}

// busily calls again and again, on all connections at once.
func (a *attacker) busily(call func(n int)) {
	for n := range 64 {
		a.work.Go(func() {
			for a.over.Err() == nil {
				call(n)
			}
		})
	}
}

// fetch reads a piece of a lease.
func fetch(ctx context.Context, c proto.PeerServiceClient, lease uint64) (data []byte, err error) {
	st, err := c.Fetch(ctx, &proto.FetchRequest{Lease: lease, Bytes: pieceBytes})
	for err == nil {
		var m *proto.FetchResponse
		if m, err = st.Recv(); err == nil {
			data = append(data, m.GetData()...)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return data, err
}

// TestBesideAnAttacker: beside a caller that holds all it may of anything a peer that reads, and a session that stores and loads, have half at
// least of what they have without it. With -liars.time it says how long they take, too.
func TestBesideAnAttacker(t *testing.T) {
	const room, here = 120, 60
	rounds := 40
	if *liarsTime > 0 {
		rounds = 400
	}
	var alone [3]time.Duration
	for _, c := range []struct {
		what   string
		attack func(a *attacker)
	}{
		{"nothing", func(*attacker) {}},
		{"connections", func(a *attacker) { a.mutes(200, nil) }},
		{"streams", func(a *attacker) {
			q := framed(t, &proto.ResidentsRequest{})
			a.mutes(20, func(m *mute) bool { return m.call(proto.PeerService_Residents_FullMethodName, q, 1<<10) })
		}},
		{"half messages", func(a *attacker) {
			a.mutes(20, func(m *mute) bool {
				return m.call(proto.PeerService_Lease_FullMethodName, append([]byte{0, 0, 15, 0, 0}, make([]byte, 60<<10)...), 15<<10)
			})
		}},
		{"buffers", func(a *attacker) {
			r, err := a.lease(0, key(1))
			testenv.OK(t, err)
			q := framed(t, &proto.FetchRequest{Lease: r.GetLease(), Bytes: pieceBytes})
			a.mutes(20, func(m *mute) bool { return m.call(proto.PeerService_Fetch_FullMethodName, q, 1<<10) })
		}},
		{"leases", func(a *attacker) {
			for n := 0; ; n++ {
				if _, err := a.lease(n, key(1)); status.Code(err) == codes.ResourceExhausted {
					return
				}
			}
		}},
		{"keys", func(a *attacker) {
			many := append(slices.Repeat([]kv.Key{key(255)}, 1<<10), key(1))
			for n := 0; ; n++ {
				if _, err := a.lease(n, many...); status.Code(err) == codes.ResourceExhausted {
					return
				}
			}
		}},
		{"entries", func(a *attacker) {
			for n := range here {
				_, err := a.lease(n, key(byte(n+1)))
				testenv.OK(t, err)
			}
		}},
		{"turns", func(a *attacker) {
			r, err := a.lease(0, key(1))
			testenv.OK(t, err)
			a.busily(func(n int) { _, _ = fetch(a.over, a.calls[n%len(a.calls)], r.GetLease()) })
		}},
		{"questions", func(a *attacker) {
			absent := slices.Repeat([]kv.Key{key(255)}, 1<<10)
			a.busily(func(n int) { _, _ = a.lease(n, absent...) })
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			l := newLenderWith(t, Config{Bandwidth: 32 << 20}, room*pieceBytes)
			l.shares.most[leases], l.shares.most[leasedKeys] = 256, 64<<10
			for n := range byte(here - 1) {
				l.put(n + 2)
			}
			over, stop := context.WithCancel(t.Context())
			a := &attacker{T: t, lender: l, over: over}
			defer a.work.Wait()
			defer stop()
			for range 4 {
				a.calls = append(a.calls, l.from(t, "127.0.0.3"))
			}
			c.attack(a)
			peer := l.from(t, "127.0.0.2")
			pool, err := staging.NewSlots(1, 1<<20)
			testenv.OK(t, err)
			defer pool.Close()
			space, err := l.store.Namespace(t.Context(), space())
			testenv.OK(t, err)
			reads, stores, loads := 0, 0, 0
			var took [3][]time.Duration // of a peer's read, a store, a load
			timed := func(what int, does func() bool) int {
				since := time.Now()
				if !does() {
					return 0
				}
				took[what] = append(took[what], time.Since(since))
				return 1
			}
			for n := range rounds {
				reads += timed(0, func() bool { // the last that are here: the attacker begins with the first
					k := key(byte(here - n%here))
					ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
					defer stop()
					r, err := peer.Lease(ctx, &proto.LeaseRequest{NamespaceDigest: l.ask.GetNamespaceDigest(), Keys: k[:], Ranks: 1, Time: durationpb.New(time.Minute)})
					if err != nil || len(r.GetEntries()) == 0 {
						return false
					}
					data, err := fetch(ctx, peer, r.GetLease())
					_, _ = peer.Return(ctx, &proto.ReturnRequest{Lease: r.GetLease()})
					return err == nil && len(data) == pieceBytes
				})
				k := kv.Key{byte(n), byte(n >> 8), 2}
				want := bytes.Repeat([]byte{byte(n)}, pieceBytes-pageBytes)
				stores += timed(1, func() bool {
					put, err := l.store.Put(t.Context(), store.PutRequest{Namespace: space, Key: k})
					return err == nil && storetest.StorePut(t.Context(), pool, put, want) == nil
				})
				loads += timed(2, func() bool {
					lease, err := l.store.Lookup(store.LookupRequest{Namespace: space, Keys: []kv.Key{k}})
					testenv.OK(t, err)
					defer lease.Release()
					p, err := lease.Open(0, 0)
					if err != nil {
						return false
					}
					defer p.Close()
					slot, err := pool.Acquire(t.Context())
					testenv.OK(t, err)
					defer slot.Release()
					_, err = p.File().ReadAt(slot.Bytes()[:p.Size()], 0)
					return err == nil && bytes.HasSuffix(slot.Bytes()[:p.Size()], want)
				})
			}
			if reads < rounds/2 || stores < rounds/2 || loads < rounds/2 {
				t.Errorf("beside one that takes %s a peer has read %d of %d, a session has stored %d and loaded %d, want half at least", c.what, reads, rounds, stores, loads)
			}
			if f := l.lending.memory.Figures(0); f.Held > f.Limit {
				t.Errorf("callers hold %d bytes, want at most %d", f.Held, f.Limit)
			}
			if *liarsTime > 0 {
				for i, name := range []string{"read", "store", "load"} {
					if slices.Sort(took[i]); len(took[i]) > 0 {
						p99 := took[i][len(took[i])*99/100]
						if c.what == "nothing" {
							alone[i] = p99
						}
						t.Logf("%s: %d of %d, p99 %s, %.2f of that without", name, len(took[i]), rounds, p99, float64(p99)/float64(alone[i]))
					}
				}
				text, err := os.ReadFile("/proc/self/statm")
				testenv.OK(t, err)
				pages, err := strconv.Atoi(strings.Fields(string(text))[1])
				testenv.OK(t, err)
				t.Logf("resident: %d MiB, with the attacker", pages*pageBytes>>20)
			}
		})
	}
}
