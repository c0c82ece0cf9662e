package peers

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
	"github.com/kvhost/kvhost/host/kv"
)

var liarsTime = flag.Duration("liars.time", 0, "how long TestLiars goes on with random seeds")

// TestLiesOfALease: what a peer says of a lease is bounded by the namespace and the protocol. It is refused, and the peer named, at once.
func TestLiesOfALease(t *testing.T) {
	for what, lie := range map[string]func(*proto.LeaseResponse){
		"a TiB":                    func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = 1 << 40 },
		"three times a piece":      func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = 3 * pieceBytes },
		"no bytes":                 func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = 0 },
		"a header":                 func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = pageBytes },
		"half a page":              func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = pieceBytes + pageBytes/2 },
		"all numbers":              func(m *proto.LeaseResponse) { m.Entries[0].Bytes[0] = math.MaxUint64 - pageBytes + 1 },
		"another key":              func(m *proto.LeaseResponse) { m.Entries[0].Index = 7 },
		"a key twice":              func(m *proto.LeaseResponse) { m.Entries[1].Index = 0 },
		"no piece":                 func(m *proto.LeaseResponse) { m.Entries[0].Bytes = nil },
		"two pieces for one":       func(m *proto.LeaseResponse) { m.Entries[0].Bytes = append(m.Entries[0].Bytes, pieceBytes) },
		"no time":                  func(m *proto.LeaseResponse) { m.Time = nil },
		"a time that is over":      func(m *proto.LeaseResponse) { m.Time = durationpb.New(-time.Hour) },
		"less time than any lease": func(m *proto.LeaseResponse) { m.Time = durationpb.New(leastLease - 1) },
		"a time that has no number": func(m *proto.LeaseResponse) {
			m.Time = &durationpb.Duration{Seconds: math.MinInt64, Nanos: math.MaxInt32}
		},
	} {
		t.Run(what, func(t *testing.T) {
			f := &fake{lease: func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
				m, err := lend(pieceBytes)(q)
				lie(m)
				return m, err
			}}
			r := newRig(t, f, 1, 2)
			if n := r.look(key(1), key(2)); n != 0 {
				t.Errorf("%d hits of a liar, want none", n)
			}
			if s := r.peers.Stats()[0]; s.Blamed != 1 || s.State != Alone {
				t.Errorf("the peer is %s and was blamed %d times, want it %s and blamed once", s.State, s.Blamed, Alone)
			}
			if s := r.store.Stats().Roots[1]; s.Used != 0 || s.Entries != 0 {
				t.Errorf("%d bytes and %d entries are borrowed, want none", s.Used, s.Entries)
			}
		})
	}
}

// TestLongHeaders: headers and texts of a peer are bounded as messages are: gRPC takes 16 MiB of them for each call, whatever is known of the peer.
func TestLongHeaders(t *testing.T) {
	for what, lie := range map[string]func(proto.PeerService_ResidentsServer) error{
		"headers": func(st proto.PeerService_ResidentsServer) error {
			return st.SendHeader(metadata.Pairs("x", strings.Repeat("x", 2*mostHeader)))
		},
		"a text": func(proto.PeerService_ResidentsServer) error {
			return status.Error(codes.Internal, strings.Repeat("x", 2*mostHeader))
		},
	} {
		t.Run(what, func(t *testing.T) {
			p, err := New(Config{Hosts: []string{serve(t, &preceded{lie: lie})}})
			testenv.OK(t, err)
			started(t, p)
			(&rig{T: t, peers: p}).await("what is wrong with it", func() bool {
				s := p.Stats()
				if len(s) == 1 && (s[0].State == Here || len(s[0].Reason) >= 2*mostHeader) {
					t.Fatalf("a peer with %s of %d bytes is %s: %d bytes of text", what, 2*mostHeader, s[0].State, len(s[0].Reason))
				}
				return len(s) == 1 && s[0].Reason != ""
			})
		})
	}
}

// TestEndlessLists: a peer that sends changes all the time is read no faster than its part of the processors allows, with a list that is whole
// or not.
func TestEndlessLists(t *testing.T) {
	prints := make([]byte, 8*batch)
	for n := range prints {
		prints[n] = byte(n / 8 >> (n % 8))
	}
	for _, m := range []*proto.ResidentsResponse{{Added: prints, Removed: prints}, {Added: prints, Removed: prints, Whole: true}, {Whole: true}} {
		t.Run(fmt.Sprint(len(m.Added), m.Whole), func(t *testing.T) {
			m.Host = bytes.Repeat([]byte{7}, 16)
			addr := serve(t, &preceded{lie: func(st proto.PeerService_ResidentsServer) (err error) {
				for err == nil {
					err = st.Send(m)
				}
				return err
			}})
			p, err := New(Config{Hosts: []string{addr}, effort: little()})
			testenv.OK(t, err)
			started(t, p)
			over, stop := context.WithCancel(t.Context())
			stop()
			testenv.Until(t, "a peer that waits", func() bool { return p.effort.Spend(over, arrivals.Sender{ID: addr}, 0) > 5*time.Millisecond })
		})
	}
}

// TestFramesOfAPeer: frames of no call that a called peer sends all the time are read as slowly, but not what follows from this host's calls.
func TestFramesOfAPeer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() { _, _ = io.Copy(io.Discard, c) }()
			go func() {
				for err := error(nil); err == nil; _, err = c.Write(bytes.Repeat([]byte{0, 0, 0, byte(http2.FrameSettings), 0, 0, 0, 0, 0}, 1000)) {
				}
			}()
		}
	}()
	p, err := New(Config{Hosts: []string{l.Addr().String()}, effort: little()})
	testenv.OK(t, err)
	started(t, p)
	over, stop := context.WithCancel(t.Context())
	stop()
	testenv.Until(t, "a peer that waits", func() bool {
		return p.effort.Spend(over, arrivals.Sender{ID: l.Addr().String()}, 0) > 5*time.Millisecond
	})
}

// preceded is a peer that does something else before it answers.
type preceded struct {
	fake
	lie func(proto.PeerService_ResidentsServer) error
}

func (f *preceded) Residents(q *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) error {
	if err := f.lie(st); err != nil {
		return err
	}
	return f.fake.Residents(q, st)
}

// TestLongTimesAreCut: a lease for longer than it was asked for lasts as long as it was asked for.
func TestLongTimesAreCut(t *testing.T) {
	f := &fake{lease: func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
		m, err := lend(pieceBytes)(q)
		m.Time = durationpb.New(math.MaxInt64)
		return m, err
	}, renew: func(*proto.RenewRequest) (*proto.RenewResponse, error) {
		return &proto.RenewResponse{Time: durationpb.New(math.MaxInt64)}, nil
	}}
	r := newRigWith(t, f, Config{LeaseTime: time.Minute}, 1)
	if n := r.look(key(1)); n != 1 {
		t.Fatalf("%d hits, want 1", n)
	}
	r.peer.mu.Lock()
	l := r.peer.loans[0]
	r.peer.mu.Unlock()
	for range 2 {
		if d := r.peer.left(l); d > 2*time.Minute {
			t.Errorf("a loan lasts for %s, want at most the two minutes that were asked for", d)
		}
		r.peer.renew(l)
	}
}

// TestCanceledByThePeer: what a peer cancels is its failure, and what did not come is a miss the next time.
func TestCanceledByThePeer(t *testing.T) {
	f := &fake{lease: lend(pieceBytes), fetch: func(*proto.FetchRequest, grpc.ServerStreamingServer[proto.FetchResponse]) error {
		return status.Error(codes.Canceled, "no")
	}}
	r := newRig(t, f, 1, 2, 3, 4, 5, 6)
	read := func() bool {
		for _, name := range r.peers.fs.names() {
			_ = r.peers.fs.piece(name).read(make([]byte, pageBytes), 0)
			return true
		}
		return false
	}
	if n := r.look(key(1)); n != 1 || !read() {
		t.Fatalf("%d hits, want 1", n)
	}
	r.await("a miss of what did not come", func() bool { return len(r.peers.fs.names()) == 0 && r.look(key(1)) == 0 })
	for n := byte(2); n < 5; n++ {
		r.look(key(n))
		read()
	}
	r.await("a peer that is left alone", func() bool { return r.peers.Stats()[0].State == Alone })
	if s := r.peers.Stats()[0]; s.Failures != mostFailures {
		t.Errorf("%d failures, want %d until it is left alone", s.Failures, mostFailures)
	}
}

// TestBusyForLong: a peer that has nothing to lend for long is asked less and less often, however it says so, and again once it lends.
func TestBusyForLong(t *testing.T) {
	for what, answer := range map[string]func() (*proto.LeaseResponse, error){
		"it lends as much as it may": func() (*proto.LeaseResponse, error) { return nil, status.Error(codes.ResourceExhausted, "later") },
		"it is busy":                 func() (*proto.LeaseResponse, error) { return &proto.LeaseResponse{Busy: true}, nil },
	} {
		t.Run(what, func(t *testing.T) {
			var lends atomic.Bool
			f := &fake{lease: func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
				if lends.Load() {
					return lend(pieceBytes)(q)
				}
				return answer()
			}}
			r := newRig(t, f, 1)
			since := time.Now()
			for range 300 {
				r.look(key(1))
			}
			most := uint64(4 + time.Since(since)/firstRest)
			if s := r.peers.Stats()[0]; s.Asks > most || s.Asks < 2 || s.Failures+s.Struck != 0 || s.State != Here {
				t.Errorf("%d asks, %d failures and %d struck out of one that is %s, want 2 to %d asks in 300 lookups", s.Asks, s.Failures, s.Struck, s.State, most)
			}
			lends.Store(true)
			r.await("a hit once it lends", func() bool { return r.look(key(1)) == 1 })
			if r.peer.rests() {
				t.Error("a peer that has lent is not asked, want that it is")
			}
		})
	}
}

// TestCanceledLeases: a peer that answers with CANCELED is left alone, as for any failure.
func TestCanceledLeases(t *testing.T) {
	f := &fake{lease: func(*proto.LeaseRequest) (*proto.LeaseResponse, error) {
		return nil, status.Error(codes.Canceled, "no")
	}}
	r := newRig(t, f, 1)
	for range 10 {
		r.look(key(1))
	}
	if s := r.peers.Stats()[0]; s.State != Alone || s.Asks != mostFailures {
		t.Errorf("it is %s after %d asks, want %s after %d", s.State, s.Asks, Alone, mostFailures)
	}
}

// TestLiars: whatever a liar answers, or does not, what an honest peer has is found and read, each lookup ends, nothing stays borrowed, no memory is
// taken, and the liar is left alone within ten failures.
func TestLiars(t *testing.T) {
	const chunks, deadline, memory = 200, 250 * time.Millisecond, 32 << 20
	heap := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	tally := testenv.NewTally(t, "liars")
	run := func(seed uint64) bool {
		return t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			good := []byte{1}
			honest := &fake{id: 8, lease: lend(pieceBytes), fetch: func(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
				return st.Send(&proto.FetchResponse{Data: bytes.Repeat(good, int(q.GetBytes()))})
			}}
			for n := range byte(chunks) {
				if n%2 == 0 {
					honest.has = append(honest.has, kv.Fingerprint(space().Digest(), 0, key(n)))
				}
			}
			all := make([]byte, chunks)
			for n := range all {
				all[n] = byte(n)
			}
			liar := peerdouble.NewLiar(t, seed, pieceBytes)
			f := &fake{id: 9, fetch: liar.Fetch, lease: func(q *proto.LeaseRequest) (*proto.LeaseResponse, error) { return liar.Lease(t.Context(), q) },
				renew: func(q *proto.RenewRequest) (*proto.RenewResponse, error) { return liar.Renew(t.Context(), q) }}
			r := newRigWith(t, f, Config{Hosts: []string{honest.serve(t)}, Deadline: deadline}, all...)
			found, lied, longest, most := 0, uint64(0), time.Duration(0), int64(0)
			runtime.GC()
			before := heap()
			for n := range byte(chunks) {
				since := time.Now()
				hits := r.look(key(n))
				longest, most = max(longest, time.Since(since)), max(most, heap()-before)
				came := false
				for _, name := range r.peers.fs.names() {
					p := r.peers.fs.piece(name)
					if p == nil || p.print != kv.Fingerprint(space().Digest(), 0, key(n)) {
						continue
					}
					b := make([]byte, pageBytes)
					if err := p.read(b, 0); err != nil {
						if !errors.Is(err, ErrAway) { // as the store does
							r.peers.Blame(name, err)
						}
					} else if came = b[0] == good[0] && b[pageBytes-1] == good[0]; !came {
						r.peers.Blame(name, errors.New("wrong bytes"))
					}
				}
				if came && hits == 1 {
					found++
				}
			}
			for _, s := range r.peers.Stats() {
				lied = max(lied, s.Failures+s.Blamed)
			}
			t.Logf("%d of %d found, the longest lookup took %s, %d failures, %d KiB of memory", found, chunks/2, longest, lied, most>>10)
			if s := r.store.Stats().Roots[1]; most > memory || s.Used > s.Capacity {
				t.Errorf("%d bytes of memory, %d bytes borrowed, want at most %d and %d", most, s.Used, memory, s.Capacity)
			}
			if found < chunks/2*9/10 {
				t.Errorf("%d of the honest peer's %d were found, want at least nine tenths", found, chunks/2)
			}
			if lied > 10 {
				t.Errorf("%d failures, want it left alone within ten", lied)
			}
			tally.Add(chunks, 0, 1)
		})
	}
	for seed := range uint64(8) {
		run(seed)
	}
	testenv.FreshSeeds(*liarsTime, run)
}

// TestStepsOfSilence: a read ends after eight steps in which nothing comes, and a step counts once however late it ends. So a pause of
// this process is no silence of the peer.
func TestStepsOfSilence(t *testing.T) {
	var cause error
	q := newSilence(time.Hour, func(err error) { cause = err })
	defer q.end()
	for range 3 {
		for range silenceSteps - 1 {
			q.pass()
		}
		q.heard()
	}
	if cause != nil {
		t.Fatalf("a read to which something comes ended by %v", cause)
	}
	for n := range 1 + silenceSteps {
		if cause != nil {
			t.Fatalf("%v after %d steps, of which bytes came in the first, want %d", cause, n, 1+silenceSteps)
		}
		q.pass()
	}
	if !errors.Is(cause, errSilent) {
		t.Errorf("a read to which nothing comes ended by %v, want %v", cause, errSilent)
	}
}

// TestQuestionsAtOnce: questions that go without an answer at the same time are one failure, as if this process had been paused. A peer that
// answers none is left alone after three in a row.
func TestQuestionsAtOnce(t *testing.T) {
	f := &fake{lease: func(*proto.LeaseRequest) (*proto.LeaseResponse, error) {
		return nil, status.Error(codes.DeadlineExceeded, "late")
	}}
	r := newRig(t, f, 1)
	since := time.Now()
	for n := range 64 {
		r.peer.failed(asking, since, errors.New("late"))
		if r.peer.is(Alone) {
			t.Fatalf("it is left alone after %d questions of one time", n+1)
		}
	}
	for range mostFailures - 1 { // each begins before the last one of the others has failed
		since := time.Now()
		r.peer.failed(asking, time.Time{}, errors.New("late"))
		r.peer.failed(asking, since, errors.New("late"))
	}
	if !r.peer.is(Alone) {
		t.Errorf("it is %s after %d questions in a row without an answer, want it alone", r.peers.Stats()[0].State, mostFailures)
	}
}
