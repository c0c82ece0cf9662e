package peers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
	"github.com/kvhost/kvhost/host/kv"
)

// dialFrom connects from an address of this machine.
func dialFrom(t *testing.T, from, to string) net.Conn {
	t.Helper()
	c, err := peerdouble.DialFrom(from, to)
	testenv.OK(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func newMute(t *testing.T, from, to string) *peerdouble.Mute {
	return peerdouble.NewMute(dialFrom(t, from, to))
}

// heap is what is allocated and in use.
func heap() int64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapInuse + s.StackInuse)
}

// TestCallersThatDoNotRead hold no more memory than callers may, and leave a peer of the configuration what it needs.
func TestCallersThatDoNotRead(t *testing.T) {
	for what, attack := range map[string]func(t *testing.T, lease uint64, m *peerdouble.Mute) bool{
		"residents": func(t *testing.T, _ uint64, m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Residents_FullMethodName, peerdouble.Framed(&proto.ResidentsRequest{}), 1<<10)
		},
		"bytes": func(t *testing.T, lease uint64, m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Fetch_FullMethodName, peerdouble.Framed(&proto.FetchRequest{Lease: lease, Bytes: 2 * pageBytes}), 1<<10)
		},
		"half a message": func(t *testing.T, _ uint64, m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Lease_FullMethodName, append([]byte{0, 0, 15, 0, 0}, make([]byte, 60<<10)...), 15<<10)
		},
		"a message in frames of a byte": func(t *testing.T, _ uint64, m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Lease_FullMethodName, append([]byte{0, 0, 15, 0, 0}, make([]byte, 4<<10)...), 1)
		},
		"calls of nothing": func(_ *testing.T, _ uint64, m *peerdouble.Mute) bool {
			return m.Call(proto.PeerService_Lease_FullMethodName, nil, 1)
		},
		"calls of a method that is none": func(_ *testing.T, _ uint64, m *peerdouble.Mute) bool {
			return m.Call("/kvhost.v1.PeerService/None", nil, 1)
		},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLender(t)
			addr := l.peers.Addr()
			l.owner.addresses.Store(&map[string]bool{"127.0.0.2": true})
			l.lending.shares.expect(1)
			held, err := l.Lease(calledBy(t, 9), l.ask)
			testenv.OK(t, err)
			before := heap()
			for range 100 {
				m := newMute(t, "127.0.0.3", addr)
				for range 2 * mostStreams {
					if !attack(t, held.GetLease(), m) {
						break
					}
				}
			}
			peer, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialFrom(t, "127.0.0.2", addr), nil }))
			testenv.OK(t, err)
			defer peer.Close()
			client := proto.NewPeerServiceClient(peer)
			r, err := client.Lease(testenv.Context(t), l.ask)
			testenv.OK(t, err)
			stream, err := client.Fetch(testenv.Context(t), &proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes})
			testenv.OK(t, err)
			if got, err := stream.Recv(); err != nil || len(got.GetData()) != pageBytes {
				t.Errorf("a peer has got %d bytes, %v, want %d", len(got.GetData()), err, pageBytes)
			}
			f := l.lending.memory.Figures(0)
			if grown := heap() - before; f.Held < 0 || f.Held > f.Limit || grown > f.Limit+f.Limit/2 {
				t.Errorf("callers hold %d bytes by the account and %d more of the heap, want at most %d", f.Held, grown, f.Limit)
			}
			t.Logf("held %d KiB of %d, heap %d KiB more", f.Held>>10, f.Limit>>10, (heap()-before)>>10)
		})
	}
}

// TestMessagesTakeTheirSize: what comes is read from memory of its size.
func TestMessagesTakeTheirSize(t *testing.T) {
	const keys = 1100
	sent, err := protobuf.Marshal(&proto.LeaseRequest{Keys: make([]byte, keys*kv.KeyBytes)})
	testenv.OK(t, err)
	codec := chargedCodec{encoding.GetCodecV2("proto")}
	var before, after runtime.MemStats
	for range 2 { // what pools have is gone after it
		runtime.GC()
	}
	runtime.ReadMemStats(&before)
	var got proto.LeaseRequest
	testenv.OK(t, codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(sent[:len(sent)/2]), mem.SliceBuffer(sent[len(sent)/2:])}, &got))
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 8*uint64(len(sent)) || len(got.GetKeys()) != keys*kv.KeyBytes {
		t.Errorf("%d bytes of memory for a message of %d, want a few times as much", n, len(sent))
	}
}

// TestFramesOfNothing: frames of no call, and connections, are charged to their sender before gRPC sees them, and to no other caller.
func TestFramesOfNothing(t *testing.T) {
	for what, attack := range map[string]func(*testing.T, string) bool{
		"settings": func(t *testing.T, to string) bool {
			return often(newMute(t, "127.0.0.3", to), func(m *peerdouble.Mute) bool { return m.WriteSettings() == nil })
		},
		"calls that are withdrawn": func(t *testing.T, to string) bool {
			return often(newMute(t, "127.0.0.3", to), func(m *peerdouble.Mute) bool {
				return m.Call(proto.PeerService_Residents_FullMethodName, nil, 1) && m.Reset()
			})
		},
		"messages that are none": func(t *testing.T, to string) bool {
			return often(newMute(t, "127.0.0.3", to), func(m *peerdouble.Mute) bool {
				return m.Call(proto.PeerService_Lease_FullMethodName, append([]byte{0, 0, 0, 0, 100}, bytes.Repeat([]byte{0xff}, 100)...), 1<<10)
			})
		},
		"connections": func(t *testing.T, to string) bool { return dialFrom(t, "127.0.0.3", to).Close() == nil },
	} {
		t.Run(what, func(t *testing.T) {
			l := newLenderWith(t, Config{effort: little()})
			over, stop := context.WithCancel(t.Context())
			stop()
			ahead := func(address string) time.Duration {
				return l.owner.effort.Spend(over, caller{address, false}.sender(), 0)
			}
			testenv.Until(t, "an attacker that waits", func() bool {
				attack(t, l.peers.Addr())
				return ahead("127.0.0.3") > 5*time.Millisecond
			})
			if n := ahead("127.0.0.2"); n != 0 {
				t.Errorf("another caller is ahead by %s, want by nothing", n)
			}
		})
	}
}

// little has so little of the processors that what arrives waits on a slow machine, too.
func little() *arrivals.Effort { return &arrivals.Effort{Part: 1e-3} }

// often sends 50 times. It is false once the connection has ended.
func often(m *peerdouble.Mute, send func(*peerdouble.Mute) bool) bool {
	go func() { _, _ = io.Copy(io.Discard, m) }()
	for range 50 {
		if !send(m) {
			return false
		}
	}
	return true
}

// TestKnocks: connections that do not show who they are end, and are few until then; a peer's is taken.
func TestKnocks(t *testing.T) {
	l := newLenderWith(t, Config{Hosts: []string{"127.0.0.2:1"}})
	testenv.Until(t, "the configuration's address", func() bool { return l.owner.addresses.Load() != nil && (*l.owner.addresses.Load())["127.0.0.2"] })
	var open []net.Conn
	for range 2 * mostKnocks {
		open = append(open, dialFrom(t, "127.0.0.3", l.peers.Addr()))
	}
	testenv.Until(t, "the end of those beyond a stranger's share", func() bool { return l.peers.Lent().Refused >= mostKnocks })
	m := newMute(t, "127.0.0.2", l.peers.Addr())
	if _, err := m.ReadFrame(); err != nil {
		t.Errorf("a peer's connection with those: %v, want the host's settings", err)
	}
	for _, c := range open { // in handshakeTime
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, io.EOF) {
			t.Logf("a connection ends: %v", err)
		}
	}
	testenv.Until(t, "no handshake is counted when all are over", func() bool {
		l.lending.shares.mu.Lock()
		defer l.lending.shares.mu.Unlock()
		return l.lending.shares.held[handshakes] == 0
	})
}

// TestAnswersAreGivenBack: what was charged for calls is given back when the caller reads, and when it goes.
func TestAnswersAreGivenBack(t *testing.T) {
	l := newLender(t)
	line, err := l.owner.dial("127.0.0.1:1", l.peers.Addr())
	testenv.OK(t, err)
	client := proto.NewPeerServiceClient(line)
	ctx, end := context.WithCancel(t.Context())
	for range 20 {
		_, err := client.Residents(ctx, &proto.ResidentsRequest{})
		testenv.OK(t, err)
		r, err := client.Lease(ctx, l.ask)
		testenv.OK(t, err)
		stream, err := client.Fetch(ctx, &proto.FetchRequest{Lease: r.GetLease(), Bytes: pageBytes})
		testenv.OK(t, err)
		_, err = stream.Recv()
		testenv.OK(t, err)
		_, err = client.Return(ctx, &proto.ReturnRequest{Lease: r.GetLease()})
		testenv.OK(t, err)
	}
	end()
	testenv.Until(t, "calls that are over", func() bool {
		return l.lending.memory.Figures(0).Held == lineBytes
	}, func() any { return l.lending.memory.Figures(1) })
	testenv.OK(t, line.Close())
	testenv.Until(t, "a connection that is over", func() bool {
		l.lending.shares.mu.Lock()
		defer l.lending.shares.mu.Unlock()
		return l.lending.memory.Figures(0).Held == 0 && len(l.lending.shares.of) == 0
	})
	if _, err := client.Lease(t.Context(), l.ask); status.Code(err) != codes.Canceled {
		t.Errorf("%v of a closed connection, want %v", err, codes.Canceled)
	}
}
