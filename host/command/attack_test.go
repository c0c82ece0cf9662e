package command

import (
	"bufio"
	"bytes"
	"context"
	wire "encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
	"github.com/kvhost/kvhost/host/kv"
)

// attackEnv has this binary attack a host instead of testing: an [attack] as JSON.
const attackEnv = "KVHOST_TEST_ATTACK"

// attack is a caller of the peers' port that takes all it gets of one thing, in a process of its own.
type attack struct {
	What      string
	From, To  string // addresses
	Namespace kv.Digest
	Keys      []kv.Key // that are there
	Bytes     uint64   // of a piece
	Nothing   bool     // it may get nothing: the host may have lost the keys

	ctx    context.Context
	calls  []proto.PeerServiceClient // each by a connection
	work   sync.WaitGroup
	leases []uint64
	called atomic.Int64 // calls of [attack.busily] that ended
}

const attackStreams = 192 // of a connection: twice as many as it may have

// attacks are by what they take.
var attacks = map[string]func(a *attack) error{
	"connections": func(a *attack) error { return a.mutes(200, nil) },
	"streams": func(a *attack) error {
		return a.mutes(20, func(m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Residents_FullMethodName, peerdouble.Framed(&proto.ResidentsRequest{}), 1<<10)
		})
	},
	"half messages": func(a *attack) error {
		return a.mutes(20, func(m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Lease_FullMethodName, append([]byte{0, 0, 15, 0, 0}, make([]byte, 60<<10)...), 15<<10)
		})
	},
	"buffers": func(a *attack) error {
		r, err := a.lease(0, a.Keys[len(a.Keys)-1])
		if err != nil {
			return err
		}
		q := peerdouble.Framed(&proto.FetchRequest{Lease: r.GetLease(), Bytes: a.Bytes})
		return a.mutes(20, func(m *peerdouble.Mute) bool { return m.Call(proto.PeerService_Fetch_FullMethodName, q, 1<<10) })
	},
	"leases": func(a *attack) error { return a.leaseAll(a.Keys[len(a.Keys)-1]) },
	"keys": func(a *attack) error {
		return a.leaseAll(append(slices.Repeat([]kv.Key{{0xff}}, 1<<10), a.Keys[len(a.Keys)-1])...)
	},
	"entries": func(a *attack) error {
		for n, k := range a.Keys {
			if _, err := a.lease(n, k); err != nil {
				return err
			}
		}
		return nil
	},
	"turns": func(a *attack) error {
		r, err := a.lease(0, a.Keys[len(a.Keys)-1])
		a.busily(func(n int) { _, _ = fetch(a.ctx, a.calls[n%len(a.calls)], r.GetLease(), a.Bytes) })
		return err
	},
	"calls": func(a *attack) error {
		a.busily(func(n int) { _, _ = a.calls[n%len(a.calls)].Return(a.ctx, &proto.ReturnRequest{Lease: 1}) })
		return nil
	},
	"places": func(a *attack) error {
		r, err := a.lease(0, a.Keys[len(a.Keys)-1])
		a.busily(func(n int) {
			c := a.calls[n%len(a.calls)]
			m, err := c.Place(a.ctx, &proto.PlaceRequest{Lease: r.GetLease(), Bytes: a.Bytes, Done: []uint64{uint64(n), 1 << 63}})
			if n%2 == 0 && err == nil { // each slot is given back often, or never
				for range 10 {
					_, _ = c.Return(a.ctx, &proto.ReturnRequest{Done: []uint64{m.GetSlot(), m.GetSlot()}})
				}
			}
		})
		return err
	},
	"questions of a crowd": func(a *attack) error {
		for n := range 16 {
			c, err := callerFrom(fmt.Sprint("127.0.1.", n+1), a.To)
			if err != nil {
				return err
			}
			a.calls = append(a.calls, c)
		}
		return a.ask()
	},
	"questions": (*attack).ask,
	"bytes": func(a *attack) error {
		r, err := a.lease(0, a.Keys[len(a.Keys)-1])
		a.busily(func(n int) { _, _ = fetch(a.ctx, a.calls[n%len(a.calls)], r.GetLease(), 1) })
		return err
	},
	"numbers": func(a *attack) error {
		q := &proto.ReturnRequest{Done: slices.Repeat([]uint64{1 << 62}, 50_000)}
		a.busily(func(n int) { _, _ = a.calls[n%len(a.calls)].Return(a.ctx, q) })
		return nil
	},
	"lists": func(a *attack) error {
		a.busily(func(n int) {
			ctx, stop := context.WithCancel(a.ctx)
			defer stop()
			if st, err := a.calls[n%len(a.calls)].Residents(ctx, &proto.ResidentsRequest{}); err == nil {
				_, _ = st.Recv()
			}
		})
		return nil
	},
	"knocks": func(a *attack) error {
		a.busily(func(int) {
			if c, err := a.dial(); err == nil {
				_ = c.Close()
			}
		})
		return nil
	},
	"nonsense": func(a *attack) error {
		return a.messages(bytes.Repeat([]byte{0xff}, 30<<10))
	},
	"elements": func(a *attack) error { // many small ones, and then the message breaks off
		store, err := protobuf.Marshal(&proto.Store{Chunks: slices.Repeat([]*proto.StoreChunk{{}}, 15<<10)})
		if err != nil {
			return err
		}
		m, err := protobuf.Marshal(&proto.SessionRequest{Body: &proto.SessionRequest_Store{Store: &proto.Store{}}})
		if err != nil {
			return err
		}
		m = wire.AppendUvarint(m[:len(m)-1], uint64(len(store)))
		return a.messages(append(append(m, store...), 0xff))
	},
	"sessions": func(a *attack) error { // begun with a message that is no HELLO
		ping := peerdouble.Framed(&proto.SessionRequest{Body: &proto.SessionRequest_Ping{Ping: &proto.Ping{}}})
		return a.messages(ping[5:])
	},
	"resets": func(a *attack) error {
		return a.frames(func(m *peerdouble.Mute) bool { return m.Call(a.method(), nil, 1) && m.Reset() })
	},
	"settings": func(a *attack) error {
		return a.frames(func(m *peerdouble.Mute) bool { return m.WriteSettings() == nil })
	},
	"windows": func(a *attack) error {
		return a.frames(func(m *peerdouble.Mute) bool { return m.WriteWindowUpdate(0, 1) == nil })
	},
}

// frames sends frames again and again, each on connections of their own.
func (a *attack) frames(send func(*peerdouble.Mute) bool) error {
	for range 8 {
		a.work.Go(func() {
			for a.ctx.Err() == nil {
				c, err := a.dial()
				if err != nil {
					return
				}
				stop := context.AfterFunc(a.ctx, func() { _ = c.Close() })
				b := &buffered{Conn: c, w: bufio.NewWriterSize(c, 16<<10)}
				go func() { _, _ = io.Copy(io.Discard, c) }()
				for m := peerdouble.NewMute(b); send(m); {
					a.called.Add(1)
				}
				stop()
				_ = c.Close()
			}
		})
	}
	return nil
}

// messages begins calls with a message again and again.
func (a *attack) messages(m []byte) error {
	m = append(wire.BigEndian.AppendUint32([]byte{0}, uint32(len(m))), m...)
	return a.frames(func(to *peerdouble.Mute) bool { return to.Call(a.method(), m, 15<<10) })
}

// method is one that reads a message.
func (a *attack) method() string {
	if a.socket() {
		return proto.EngineService_Session_FullMethodName
	}
	return proto.PeerService_Lease_FullMethodName
}

// socket reports whether it attacks the socket of sessions.
func (a *attack) socket() bool { return filepath.IsAbs(a.To) }

func (a *attack) dial() (net.Conn, error) {
	if a.socket() {
		return net.Dial("unix", a.To)
	}
	return peerdouble.DialFrom(a.From, a.To)
}

// buffered is a connection with a buffer for what is written.
type buffered struct {
	net.Conn
	w *bufio.Writer
}

func (b *buffered) Write(p []byte) (int, error) { return b.w.Write(p) }

// callerFrom is a caller of a host's port at an address of this machine.
func callerFrom(from, to string) (proto.PeerServiceClient, error) {
	c, err := grpc.NewClient("passthrough:///"+to, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return peerdouble.DialFrom(from, to) }))
	return proto.NewPeerServiceClient(c), err
}

// fetch reads a piece of a lease.
func fetch(ctx context.Context, c proto.PeerServiceClient, lease, bytes uint64) (data []byte, err error) {
	st, err := c.Fetch(ctx, &proto.FetchRequest{Lease: lease, Bytes: bytes})
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

func (a *attack) lease(n int, keys ...kv.Key) (*proto.LeaseResponse, error) {
	r, err := a.calls[n%len(a.calls)].Lease(a.ctx, leaseOf(a.Namespace, keys...))
	if id := r.GetLease(); id != 0 {
		a.leases = append(a.leases, id)
	}
	return r, err
}

func leaseOf(space kv.Digest, keys ...kv.Key) *proto.LeaseRequest {
	q := &proto.LeaseRequest{NamespaceDigest: space[:], Ranks: 1, Time: durationpb.New(10 * time.Minute)}
	for _, k := range keys {
		q.Keys = append(q.Keys, k[:]...)
	}
	return q
}

func (a *attack) leaseAll(keys ...kv.Key) error {
	for n := 0; ; n++ {
		if r, err := a.lease(n, keys...); status.Code(err) == codes.ResourceExhausted {
			return nil
		} else if err != nil || len(r.GetEntries()) == 0 {
			return fmt.Errorf("%d leases, and then %d entries: %w", n, len(r.GetEntries()), err)
		}
	}
}

// mutes are connections that call and do not read. The host may refuse them.
func (a *attack) mutes(connections int, call func(*peerdouble.Mute) bool) error {
	for range connections {
		c, err := peerdouble.DialFrom(a.From, a.To)
		if err != nil {
			return err
		}
		m := peerdouble.NewMute(c)
		for range attackStreams {
			if call == nil || !call(m) {
				break
			}
		}
	}
	return nil
}

func (a *attack) ask() error {
	absent := slices.Repeat([]kv.Key{{0xff}}, 1<<10)
	a.busily(func(n int) { _, _ = a.calls[n%len(a.calls)].Lease(a.ctx, leaseOf(a.Namespace, absent...)) })
	return nil
}

// busily calls again and again, on all connections at once.
func (a *attack) busily(call func(n int)) {
	for n := range 64 {
		a.work.Go(func() {
			for a.ctx.Err() == nil {
				call(n)
				a.called.Add(1)
			}
		})
	}
}

// attackMain attacks until standard input ends, and gives back what it had.
func attackMain(text string) int {
	var a attack
	err := json.Unmarshal([]byte(text), &a)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	a.ctx = ctx
	for range 4 {
		c, failed := callerFrom(a.From, a.To)
		if a.calls = append(a.calls, c); failed != nil {
			err = failed
		}
	}
	if err == nil {
		err = attacks[a.What](&a)
	}
	if err != nil && !a.Nothing {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	since := time.Now()
	_, _ = io.Copy(io.Discard, os.Stdin)
	if n := a.called.Load(); n > 0 {
		fmt.Printf("%.0f calls a second\n", float64(n)/time.Since(since).Seconds())
	}
	stop()
	a.work.Wait()
	for _, id := range a.leases {
		_, _ = a.calls[0].Return(context.Background(), &proto.ReturnRequest{Lease: id})
	}
	return 0
}

// start runs an attack in a process until end, or the test's end. It has what it gets when start returns.
func (a *attack) start(t *testing.T) (end func()) {
	t.Helper()
	text, err := json.Marshal(a)
	testenv.OK(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), attackEnv+"="+string(text))
	in, err := cmd.StdinPipe()
	testenv.OK(t, err)
	out, err := cmd.StdoutPipe()
	testenv.OK(t, err)
	testenv.OK(t, cmd.Start())
	end = sync.OnceFunc(func() {
		_ = in.Close()
		said, _ := io.ReadAll(out)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the attacker: %v: %s", err, said)
		} else if len(said) > 0 {
			t.Logf("the attacker made %s", bytes.TrimSpace(said))
		}
	})
	t.Cleanup(end)
	if said, err := bufio.NewReader(out).ReadString('\n'); strings.TrimSpace(said) != "ready" {
		t.Fatalf("the attacker that takes %s: %q, %v", a.What, said, err)
	}
	return end
}
