// Package peerdouble is hosts that lend as they should not, and callers of a host that lends.
package peerdouble

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Liar is a peer that answers as the protocol lets it, and not as it should: by its seed.
type Liar struct {
	proto.UnimplementedPeerServiceServer
	Has   []uint64 // fingerprints that it says it has
	Bytes uint64   // of a piece, where it does not lie about that
	// Of its agent of NIXL, named by [Host], and where that has how much memory. Without metadata it tells nonsense.
	NIXL          []byte
	Address, Room uint64

	over   chan struct{}
	mu     sync.Mutex
	random *rand.Rand
	lies   int
}

// Host is who liars are.
var Host = bytes.Repeat([]byte{9}, 16)

// NewLiar is a liar whose calls end with the test.
func NewLiar(t testing.TB, seed, bytes uint64) *Liar {
	l := &Liar{Bytes: bytes, over: make(chan struct{}), random: rand.New(rand.NewPCG(seed, 0))}
	t.Cleanup(func() { close(l.over) })
	return l
}

// Serve has it serve at an address, or at one of its choice, until the test ends.
func (l *Liar) Serve(t testing.TB, at string) string {
	t.Helper()
	port, err := net.Listen("tcp", at)
	testenv.OK(t, err)
	g := grpc.NewServer()
	proto.RegisterPeerServiceServer(g, l)
	go func() { _ = g.Serve(port) }()
	t.Cleanup(g.Stop)
	return port.Addr().String()
}

// Lies is how often it has lied.
func (l *Liar) Lies() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lies
}

func (l *Liar) draw(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.random.IntN(n)
}

// lie draws one of n lies.
func (l *Liar) lie(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lies++
	return l.random.IntN(n)
}

func (l *Liar) fails() error {
	time.Sleep(time.Duration(l.draw(30)) * time.Millisecond)
	return status.Error(codes.Code(1+l.draw(16)), "\x1b[31mno\n")
}

// silent answers nothing until the test or the caller's time is over, and nothing then: the caller may see that later.
func (l *Liar) silent(ctx context.Context) error {
	select {
	case <-l.over:
	case <-ctx.Done():
	}
	return status.FromContextError(cmp.Or(ctx.Err(), context.Canceled)).Err()
}

// Residents implements the service. What it says later is at random, and the stream ends now and then.
func (l *Liar) Residents(_ *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) error {
	m := &proto.ResidentsResponse{Host: Host, Whole: true, Turnover: new(uint64(1 << 62)), Nixl: l.NIXL}
	if m.Nixl == nil {
		m.Nixl = l.garbage(1 << 10)
	}
	for _, p := range l.Has {
		m.Added = binary.LittleEndian.AppendUint64(m.Added, p)
	}
	for err := st.Send(m); ; err = st.Send(m) {
		if err != nil {
			return err
		}
		select {
		case <-st.Context().Done():
			return nil
		case <-l.over:
			return nil
		case <-time.After(200 * time.Millisecond):
		}
		m = &proto.ResidentsResponse{}
		switch l.lie(100) {
		case 0:
			return l.fails()
		case 1:
			m.Added = l.garbage(1 << 10) // not of whole fingerprints
		case 2:
			m.Nixl = l.garbage(1 << 16)
		case 4, 5, 6:
			m.Nixl = bytes.Clone(l.NIXL)
			for i := range m.Nixl {
				if l.draw(len(m.Nixl)) < 4 {
					m.Nixl[i] ^= 1 << l.draw(8)
				}
			}
		case 7, 8, 9:
			m.Nixl = l.NIXL
		case 3:
			m.Turnover = new(uint64(l.draw(1 << 40)))
		default:
			m.Added, m.Removed = l.garbage(8 * 64)[:8*32], nil
			for range 16 {
				if len(l.Has) > 0 {
					m.Removed = binary.LittleEndian.AppendUint64(m.Removed, l.Has[l.draw(len(l.Has))])
					m.Added = binary.LittleEndian.AppendUint64(m.Added, l.Has[l.draw(len(l.Has))])
				}
			}
		}
	}
}

// garbage is n bytes or more that mean nothing.
func (l *Liar) garbage(n int) (b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(b) < n {
		b = binary.LittleEndian.AppendUint64(b, l.random.Uint64())
	}
	return append(b, 1)
}

// Lease implements the service.
func (l *Liar) Lease(ctx context.Context, q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	m := &proto.LeaseResponse{Lease: 1, Time: durationpb.New(time.Minute)}
	for i := range len(q.GetKeys()) / kv.KeyBytes {
		m.Entries = append(m.Entries, &proto.LentEntry{Index: uint32(i), Bytes: []uint64{l.Bytes}})
	}
	if len(m.Entries) == 0 {
		return m, nil
	}
	e := m.Entries[l.draw(len(m.Entries))]
	switch l.lie(10) {
	case 0:
		return nil, l.fails()
	case 1:
		e.Bytes[0] = 1 << l.draw(64)
	case 2:
		e.Index = uint32(l.draw(1 << 20))
	case 3:
		m.Time = &durationpb.Duration{Seconds: int64(l.draw(1<<40)) - 1<<39}
	case 4:
		m.Entries, m.Busy = nil, true
	case 5:
		m.Entries = nil
	case 6:
		e.Bytes = append(e.Bytes, e.Bytes...)
	case 7:
		return nil, l.silent(ctx)
	}
	return m, nil
}

// Place implements the service. Its memory is read, by which it proves itself, more often than not.
func (l *Liar) Place(ctx context.Context, q *proto.PlaceRequest) (*proto.PlaceResponse, error) {
	if l.NIXL == nil {
		return nil, l.fails()
	}
	m := &proto.PlaceResponse{Parts: []*proto.PlacedPart{{Address: l.Address, Bytes: min(l.Room, q.GetBytes())}}, Slot: 1}
	p := m.Parts[0]
	if q.GetLease() == 0 && l.draw(4) > 0 {
		return m, nil
	}
	switch l.lie(12) {
	case 0:
		return nil, l.fails()
	case 1:
		p.Address = 1 << l.draw(64)
	case 2:
		p.Address = l.Address + l.Room - p.Bytes/2
	case 3:
		p.Bytes = 1 << l.draw(64)
	case 4:
		p.Bytes, m.Slot = l.Bytes, 0
	case 5:
		m.Parts, m.Slot = append(m.Parts, m.Parts...), 0
	case 6:
		m.Parts = nil
	case 7:
		p.Bytes = uint64(l.draw(int(p.Bytes))) + 1
	case 8:
		m.Parts = slices.Repeat(m.Parts, 1000)
	case 9:
		return nil, l.silent(ctx)
	}
	return m, nil // with other bytes than were stored
}

// Renew implements the service.
func (l *Liar) Renew(context.Context, *proto.RenewRequest) (*proto.RenewResponse, error) {
	return &proto.RenewResponse{Time: &durationpb.Duration{Seconds: int64(l.draw(1<<40)) - 1<<39}}, nil
}

// Return implements the service.
func (l *Liar) Return(context.Context, *proto.ReturnRequest) (*proto.ReturnResponse, error) {
	return &proto.ReturnResponse{}, nil
}

// Fetch implements the service.
func (l *Liar) Fetch(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
	switch n := q.GetBytes(); l.lie(5) {
	case 0:
		return l.fails()
	case 1:
		return st.Send(&proto.FetchResponse{Data: bytes.Repeat([]byte{9}, int(n))}) // others' bytes
	case 2:
		return st.Send(&proto.FetchResponse{Data: make([]byte, 2*n)})
	case 3:
		return st.Send(&proto.FetchResponse{Data: make([]byte, n/2)})
	}
	return st.Send(&proto.FetchResponse{})
}
