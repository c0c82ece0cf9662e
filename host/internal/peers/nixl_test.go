package peers

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

func nixlPath(t testing.TB) string {
	testenv.Need(t, testenv.NIXL, testenv.OthersMemory)
	return filepath.Join(testenv.Root(), ".build", "nixl")
}

// placing is a fake with an agent, whose memory is all of one byte; what it sends is all of another.
type placing struct {
	*fake
	agent   *nixl.Agent
	memory  *staging.Mapping
	base    uint64 // its address
	reader  staging.File
	dst     []byte
	fetched int
	done    []uint64
}

const read, sent = 0x5a, 0xc3

func newPlacing(t *testing.T, place func(p *placing, q *proto.PlaceRequest) (*proto.PlaceResponse, error)) (*rig, *placing) {
	lib, err := nixl.Open(nixlPath(t))
	testenv.OK(t, err)
	p := &placing{}
	p.agent, err = lib.Agent(hex.EncodeToString(bytes.Repeat([]byte{7}, 16)), 1)
	testenv.OK(t, err)
	p.memory, err = staging.Map(1 << 20)
	testenv.OK(t, err)
	p.base = uint64(uintptr(unsafe.Pointer(&p.memory.Bytes()[0])))
	copy(p.memory.Bytes(), bytes.Repeat([]byte{read}, 1<<20))
	testenv.OK(t, p.agent.Register(p.memory.Bytes()))
	t.Cleanup(func() { testenv.NoError(t, p.agent.Close()) })
	p.fake = &fake{lease: lend(pieceBytes), fetch: func(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
		p.fetched++
		return st.Send(&proto.FetchResponse{Data: bytes.Repeat([]byte{sent}, int(q.GetBytes()))})
	}, place: func(_ context.Context, q *proto.PlaceRequest) (*proto.PlaceResponse, error) {
		if q.GetLease() == 0 { // to prove that it can be read
			m := parts(p.at(0), q.GetBytes())
			m.Slot = 1
			return m, nil
		}
		p.done = append(p.done, q.GetDone()...)
		return place(p, q)
	}}
	p.nixl, err = p.agent.Metadata()
	testenv.OK(t, err)
	r := newRigWith(t, p.fake, Config{NIXL: nixlPath(t)}, 1)
	if n := r.look(key(1)); n != 1 {
		t.Fatalf("%d hits, want 1", n)
	}
	p.reader, err = r.peers.fs.OpenFile(r.peers.fs.names()[0], os.O_RDONLY, 0)
	testenv.OK(t, err)
	mem, err := staging.Map(1 << 20)
	testenv.OK(t, err)
	p.dst = mem.Bytes()
	testenv.OK(t, r.peers.Pinners()[0].Register(p.dst))
	r.await("it is read by NIXL", func() bool { return r.peers.nixl.isProven(p.agent.Name()) })
	return r, p
}

func (p *placing) at(off int) uint64 { return p.base + uint64(off) }

// all says that bytes are all the same.
func all(b []byte, is byte) bool { return len(bytes.Trim(b, string([]byte{is}))) == 0 }

func parts(list ...uint64) (m *proto.PlaceResponse) {
	m = &proto.PlaceResponse{}
	for i := 0; i < len(list); i += 2 {
		m.Parts = append(m.Parts, &proto.PlacedPart{Address: list[i], Bytes: list[i+1]})
	}
	return m
}

// TestPlaces: what a peer says of its memory is read there if it can be, and else fetched; whatever it says, no other bytes come.
func TestPlaces(t *testing.T) {
	type answer = func(p *placing, q *proto.PlaceRequest) (*proto.PlaceResponse, error)
	says := func(f func(p *placing, q *proto.PlaceRequest) *proto.PlaceResponse) answer {
		return func(p *placing, q *proto.PlaceRequest) (*proto.PlaceResponse, error) { return f(p, q), nil }
	}
	refuses := func(c codes.Code) answer {
		return func(*placing, *proto.PlaceRequest) (*proto.PlaceResponse, error) { return nil, status.Error(c, "no") }
	}
	for name, c := range map[string]struct {
		place answer
		read  bool
	}{
		"the whole piece": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse { return parts(p.at(0), pieceBytes) }), true},
		"the whole piece in parts": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse {
			return parts(p.at(0), 4096, p.at(8192), 4096, p.at(32768), pieceBytes-8192)
		}), true},
		"slots of less": {says(func(p *placing, q *proto.PlaceRequest) *proto.PlaceResponse {
			m := parts(p.at(int(q.GetOffset())), min(q.GetBytes(), 3000))
			m.Slot = q.GetOffset() + 1
			return m
		}), true},
		"an address that is not its": {says(func(*placing, *proto.PlaceRequest) *proto.PlaceResponse { return parts(4096, pieceBytes) }), false},
		"memory beyond its": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse {
			return parts(p.at(1<<20-4096), pieceBytes)
		}), false},
		"less than the piece": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse { return parts(p.at(0), pieceBytes-1) }), false},
		"more than the piece": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse {
			return parts(p.at(0), pieceBytes, p.at(0), 1)
		}), false},
		"an immense part": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse { return parts(p.at(0), 1<<63) }), false},
		"a part of nothing": {says(func(p *placing, _ *proto.PlaceRequest) *proto.PlaceResponse {
			return parts(p.at(0), 0, p.at(0), pieceBytes)
		}), false},
		"nothing":         {says(func(*placing, *proto.PlaceRequest) *proto.PlaceResponse { return parts() }), false},
		"no NIXL":         {refuses(codes.FailedPrecondition), false},
		"that it is busy": {refuses(codes.ResourceExhausted), false},
	} {
		t.Run(name, func(t *testing.T) {
			r, p := newPlacing(t, c.place)
			dst := p.dst[4096 : 4096+8192]
			for n := range 2 {
				if got, err := p.reader.ReadAt(dst, 4096); got != len(dst) || err != nil {
					t.Fatalf("%d bytes, %v, want all", got, err)
				}
				want := byte(sent)
				if c.read {
					want = read
				}
				if !all(dst, want) || !all(p.dst[:4096], 0) || !all(p.dst[4096+8192:], 0) {
					t.Errorf("read %d has other bytes, or wrote around its destination", n)
				}
				clear(dst)
			}
			s := r.peers.Stats()[0]
			if by := uint64(2 * len(dst)); c.read && (s.NIXLBytes != by || s.NIXLFallbacks != 0 || p.fetched != 0) ||
				!c.read && (s.NIXLBytes != 0 || s.NIXLFallbacks != 2 || p.fetched != 2) {
				t.Errorf("%+v and %d fetches, want by NIXL: %v", s, p.fetched, c.read)
			}
			w := r.peers.nixl
			if name == "slots of less" && len(p.done) < 3 {
				t.Errorf("the peer knows of %d slots that they are read, want all but the last three", len(p.done))
			}
			r.await("all reads have ended", func() bool { return len(w.places) == 0 })
		})
	}
}

// TestPlacedOnce: a place is asked for once for the bytes of a piece, and again when they have been read.
func TestPlacedOnce(t *testing.T) {
	asked := 0
	_, p := newPlacing(t, func(p *placing, _ *proto.PlaceRequest) (*proto.PlaceResponse, error) {
		asked++
		return parts(p.at(0), pieceBytes), nil
	})
	for n := range int64(2 * pieceBytes / 4096) {
		if _, err := p.reader.ReadAt(p.dst[:4096], n*4096%pieceBytes); err != nil {
			t.Fatal(err)
		}
	}
	if asked != 2 {
		t.Errorf("a peer was asked %d times for a piece that was read twice, want 2", asked)
	}
}

// TestFailedRead: the memory of a READ that failed is kept a while. It is no system call that hangs. The peer is read by gRPC then.
func TestFailedRead(t *testing.T) {
	r, p := newPlacing(t, func(p *placing, _ *proto.PlaceRequest) (*proto.PlaceResponse, error) {
		return parts(p.at(0), pieceBytes), nil
	})
	dst := p.dst[:8192]
	if _, err := p.reader.ReadAt(dst, 0); err != nil {
		t.Fatal(err)
	}
	testenv.OK(t, p.memory.Unmap())
	since := time.Now()
	_, err := p.reader.ReadAt(dst, 0)
	var held staging.Held
	if !errors.Is(err, ErrAway) || errors.Is(err, staging.ErrHung) || !errors.As(err, &held) {
		t.Fatalf("%v, want %v with memory that is held", err, ErrAway)
	}
	if _, err := p.reader.ReadAt(p.dst[8192:16384], 0); err != nil || !all(p.dst[8192:16384], sent) {
		t.Errorf("%v, want the bytes by gRPC", err)
	}
	<-held.Ended()
	if d := time.Since(since); d < afterError {
		t.Errorf("the memory was given back after %s, want %s at least", d, afterError)
	}
	r.await("all reads have ended", func() bool { return len(r.peers.nixl.places) == 0 && r.peers.nixl.stuck.Load() == 0 })
}

// TestRenewedWhileRead: a loan is renewed while it is read, which the race detector watches.
func TestRenewedWhileRead(t *testing.T) {
	r, p := newPlacing(t, func(p *placing, _ *proto.PlaceRequest) (*proto.PlaceResponse, error) {
		return parts(p.at(0), pieceBytes), nil
	})
	p.renew = func(*proto.RenewRequest) (*proto.RenewResponse, error) {
		return &proto.RenewResponse{Time: durationpb.New(time.Hour)}, nil
	}
	l := r.peers.fs.piece(r.peers.fs.names()[0]).loan
	var renewing sync.WaitGroup
	renewing.Go(func() {
		for range 500 {
			r.peer.renew(l)
		}
	})
	for range 500 {
		if _, err := p.reader.ReadAt(p.dst[:4096], 0); err != nil {
			t.Error(err)
		}
	}
	renewing.Wait()
}

// TestFailedProof: a peer is not forgotten, nor proven again, before the READ of a proof that failed has ended.
func TestFailedProof(t *testing.T) {
	r, p := newPlacing(t, nil)
	w := r.peers.nixl
	w.mu.Lock()
	x := w.remotes[p.agent.Name()]
	w.mu.Unlock()
	testenv.OK(t, p.memory.Unmap())
	w.doubt(x, ErrAway)
	r.await("a proof has failed, and its READ counts", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return x.pause > firstPause && x.reads == 1
	})
	r.await("it has ended", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return x.reads == 0
	})
}

// TestGoneBeforeAll: a peer that goes before it has told all its entries is forgotten too.
func TestGoneBeforeAll(t *testing.T) {
	r, p := newPlacing(t, nil)
	x, w := r.peer, r.peers.nixl
	x.mu.Lock()
	x.state = Away
	x.mu.Unlock()
	x.leave(ErrAway)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.remotes[p.agent.Name()] != nil {
		t.Error("the agent of a peer that has gone is kept")
	}
}

// TestNoPlaceInTime: a peer that does not say where bytes are costs what one costs that does not send any.
func TestNoPlaceInTime(t *testing.T) {
	over := make(chan struct{})
	_, p := newPlacing(t, func(p *placing, _ *proto.PlaceRequest) (*proto.PlaceResponse, error) {
		<-over
		return nil, status.Error(codes.Unavailable, "")
	})
	defer close(over)
	if _, err := p.reader.ReadAt(p.dst[:8192], 0); !errors.Is(err, ErrAway) || p.fetched != 0 {
		t.Errorf("%v and %d fetches, want %v without one: the time is over", err, p.fetched, ErrAway)
	}
}

// TestPlaced: a lender names where bytes are of what it has in files: one caller gets half of the slots, each for a time or until it is read.
func TestPlaced(t *testing.T) {
	l := newLenderWith(t, Config{NIXL: nixlPath(t)})
	lease, err := l.Lease(t.Context(), l.ask)
	testenv.OK(t, err)
	size := lease.GetEntries()[0].GetBytes()[0]
	ask := func(off, n uint64, done ...uint64) (*proto.PlaceResponse, error) {
		return l.Place(t.Context(), &proto.PlaceRequest{Lease: lease.GetLease(), Offset: off, Bytes: n, Done: done})
	}
	st := &sink{ctx: t.Context()}
	testenv.OK(t, l.Fetch(&proto.FetchRequest{Lease: lease.GetLease(), Bytes: size}, st))
	var slots []uint64
	for n := range uint64(mostPlaced / 2) {
		m, err := ask(n*100, size-n*100)
		testenv.OK(t, err)
		if m.GetSlot() == 0 || len(m.GetParts()) != 1 || m.GetParts()[0].GetBytes() != size-n*100 {
			t.Fatalf("%v, want a slot with all bytes", m)
		}
		l.shelf.mu.Lock()
		slot := l.shelf.out[m.GetSlot()].Bytes()
		l.shelf.mu.Unlock()
		from := m.GetParts()[0].GetAddress() - partOf(slot).GetAddress()
		if !bytes.Equal(slot[from:from+size-n*100], st.data[n*100:]) {
			t.Errorf("from byte %d a slot has other bytes than are fetched", n*100)
		}
		slots = append(slots, m.GetSlot())
	}
	if _, err := ask(0, size); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v with half of the slots, want it refused", err)
	}
	other := grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9), Port: 1}})
	if m, err := l.Place(other, &proto.PlaceRequest{Lease: lease.GetLease(), Bytes: size}); err != nil {
		t.Errorf("%v for another caller beside one that has all it may, want a place", err)
	} else {
		l.shelf.done([]uint64{m.GetSlot()})
	}
	if _, err := ask(0, size, slots[0], slots[0], 12345); err != nil {
		t.Errorf("%v when one slot was read, want a place", err)
	}
	l.shelf.patience = time.Minute
	waited := make(chan error, 1)
	go func() {
		_, err := ask(0, size)
		waited <- err
	}()
	select {
	case err := <-waited:
		t.Fatalf("%v at once with half of the slots, want it to wait", err)
	case <-time.After(20 * time.Millisecond): // code that does not wait has answered
	}
	_, err = l.Return(t.Context(), &proto.ReturnRequest{Done: slots[1:2]})
	testenv.NoError(t, errors.Join(err, <-waited))
	l.shelf.patience = time.Millisecond
	l.shelf.end(time.Now().Add(placeTime / 2))
	if _, err := ask(0, size); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v before the slots' time is over, want it refused", err)
	}
	l.shelf.end(time.Now().Add(placeTime + time.Second))
	if n := l.shelf.slots.InUse(); n != 0 {
		t.Errorf("%d slots are in use after their time, want none", n)
	}
	for _, c := range [][2]uint64{{0, size + 1}, {size, 0}, {size + 1, 0}, {1 << 63, 1}, {1, 1<<64 - 1}} {
		if _, err := ask(c[0], c[1]); status.Code(err) != codes.OutOfRange {
			t.Errorf("%d bytes at %d: %v, want out of range", c[1], c[0], err)
		}
	}
	if _, err := l.Place(t.Context(), &proto.PlaceRequest{Lease: lease.GetLease() + 1, Bytes: 1}); status.Code(err) != codes.NotFound {
		t.Errorf("%v for a lease that is none, want not found", err)
	}
	if n := l.shelf.slots.InUse(); n != 0 {
		t.Errorf("%d slots are in use after refusals, want none", n)
	}
	l.pace.rate = float64(size) / 4
	_, err = ask(0, size)
	testenv.OK(t, err)
	_, err = ask(0, size)
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v for more bytes than are lent a second, want it refused", err)
	}
}

// TestHungPlace: a slot that a read still uses, which was given up, is not lent to another.
func TestHungPlace(t *testing.T) {
	l := newLenderOf(t, Config{NIXL: nixlPath(t)}, givesUp)
	r, err := l.Lease(t.Context(), l.ask)
	testenv.OK(t, err)
	l.disk.Set(faultfs.Rule{Op: staging.OpRead, Path: "**", Fault: faultfs.Fault{Hang: true}})
	if _, err := l.Place(t.Context(), &proto.PlaceRequest{Lease: r.GetLease(), Bytes: pageBytes}); status.Code(err) != codes.DataLoss {
		t.Errorf("%v, want the read given up", err)
	}
	if n := l.shelf.slots.InUse(); n != 1 {
		t.Errorf("%d slots are in use while a read hangs, want 1", n)
	}
	l.disk.Release()
	testenv.Until(t, "the slot of a read that has ended is free", func() bool { return l.shelf.slots.InUse() == 0 })
}

// TestPlacesOfOne: a peer that takes all its places leaves some to others, and who waits in vain is told to fetch.
func TestPlacesOfOne(t *testing.T) {
	w := &nixlWay{places: make(chan struct{}, mostReads), remotes: map[string]*remote{}}
	for _, name := range []string{"a", "b"} {
		w.remotes[name] = &remote{name: name, wanted: true, proven: true, places: make(chan struct{}, mostOfOne)}
	}
	for range mostOfOne {
		if r, _ := w.begin(t.Context(), "a"); r == nil {
			t.Fatal("no place for a peer that has fewer than it may")
		}
	}
	if r, has := w.begin(t.Context(), "a"); r != nil || !has || w.remotes["a"].reads != mostOfOne {
		t.Errorf("%v, %v for one more of that peer and %d reads, want none and NIXL", r, has, w.remotes["a"].reads)
	}
	r, _ := w.begin(t.Context(), "b")
	if r == nil {
		t.Fatal("no place for another peer")
	}
	w.end(r)
	w.end(w.remotes["a"])
	if r, _ := w.begin(t.Context(), "a"); r == nil {
		t.Error("no place after one was given back")
	}
	w.remotes["b"].stuck = 1
	if r, has := w.begin(t.Context(), "b"); r != nil || !has {
		t.Error("a place for a peer with a READ that was given up")
	}
	if r, has := w.begin(t.Context(), "c"); r != nil || has {
		t.Error("a place for a peer without NIXL")
	}
}

// FuzzPlaces: whatever parts a peer names, those of a range are as long as it, and within them.
func FuzzPlaces(f *testing.F) {
	f.Add([]byte{1, 2, 3}, int64(1), int64(2))
	f.Add([]byte{0, 255, 7}, int64(100), int64(9))
	f.Fuzz(func(t *testing.T, lengths []byte, off, n int64) {
		m := &proto.PlaceResponse{}
		sum := int64(0)
		for i, b := range lengths {
			m.Parts = append(m.Parts, &proto.PlacedPart{Address: uint64(i) << 32, Bytes: uint64(b) * uint64(b)})
			sum += int64(b) * int64(b)
		}
		list, got, err := partsOf(m, sum)
		if bad := bytes.IndexByte(lengths, 0) >= 0 || len(lengths) == 0; (err != nil) != bad || !bad && got != sum {
			t.Fatalf("%d bytes, %v of parts %v, want %d", got, err, lengths, sum)
		}
		if _, _, err := partsOf(m, sum-1); err == nil {
			t.Fatal("more than the most was taken")
		}
		if err != nil || off < 0 || off > sum || n < 0 || n > sum-off {
			return
		}
		taken := int64(0)
		for _, p := range from(list, off, n) {
			at := p.Address >> 32
			if inside := int64(p.Address & (1<<32 - 1)); p.Bytes <= 0 || inside+p.Bytes > list[at].Bytes {
				t.Fatalf("part %+v is not within %+v", p, list[at])
			}
			taken += p.Bytes
		}
		if taken != n {
			t.Fatalf("%d bytes of %d", taken, n)
		}
	})
}
