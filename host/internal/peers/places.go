package peers

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

const (
	mostPlaced = 16                  // slots
	placeBytes = 4<<20 + 2*pageBytes // of a slot: what a load reads at a time, wherever it begins
	// placeTime is how long a slot is lent for. A READ that takes longer than stall is given up, and its bytes count for nothing.
	placeTime = 2*stall + time.Second
	slotWait  = 100 * time.Millisecond // for a slot: others are read in a few
)

// shelf is the memory where peers read what this host has in files.
type shelf struct {
	slots    *staging.Slots
	patience time.Duration

	mu  sync.Mutex
	out map[uint64]lentSlot
}

type lentSlot struct {
	takenSlot
	ends time.Time
}

// takenSlot is a slot out of a caller's share.
type takenSlot struct {
	*staging.Slot
	of  *lending
	who caller
}

func (s *takenSlot) Release() {
	s.Slot.Release()
	s.of.back(s.who, places)
}

func newShelf(p staging.Pinner) (*shelf, error) {
	slots, err := staging.NewSlots(mostPlaced, placeBytes)
	if err != nil {
		return nil, err
	}
	return &shelf{slots: slots, patience: slotWait, out: map[uint64]lentSlot{}}, slots.Register(p)
}

// lend gives a slot a number that another peer cannot guess.
func (s *shelf) lend(slot takenSlot) (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for taken := true; n == 0 || taken; _, taken = s.out[n] {
		n = rand.Uint64()
	}
	s.out[n] = lentSlot{slot, time.Now().Add(placeTime)}
	return n
}

// done takes slots back.
func (s *shelf) done(list []uint64) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range list {
		if slot, ok := s.out[n]; ok {
			delete(s.out, n)
			slot.Release()
		}
	}
}

// end takes back the slots that were lent too long.
func (s *shelf) end(now time.Time) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, slot := range s.out {
		if now.After(slot.ends) {
			delete(s.out, n)
			slot.Release()
		}
	}
}

// close unmaps the slots, with the agent closed. One that a hung read still uses is unmapped when that ends.
func (s *shelf) close() error {
	if s == nil {
		return nil
	}
	s.end(time.Now().Add(2 * placeTime))
	if err := s.slots.Close(); !errors.Is(err, staging.ErrSlotsOut) {
		return err
	}
	return nil
}

// Place implements the service.
func (s service) Place(ctx context.Context, q *proto.PlaceRequest) (*proto.PlaceResponse, error) {
	if s.shelf == nil {
		return nil, status.Error(codes.FailedPrecondition, "this host has no NIXL")
	}
	s.shelf.done(q.GetDone())
	if q.GetLease() == 0 {
		return s.inSlot(ctx, nil, 0, int64(min(q.GetBytes(), placeBytes)))
	}
	piece, off, end, err := s.open(q.GetLease(), q.GetIndex(), q.GetRank(), q.GetOffset(), q.GetBytes())
	if err != nil {
		return nil, err
	}
	defer piece.Close()
	if parts := s.inMemory(piece); parts != nil {
		if err := s.pace.waitOf(ctx, s.owner.callerOf(ctx), piece.Size()); err != nil {
			return nil, err
		}
		s.sent(piece.Size())
		return &proto.PlaceResponse{Parts: parts}, nil
	}
	return s.inSlot(ctx, piece, off, end)
}

func (s service) sent(n int64) {
	s.count.bytes.Add(uint64(n))
	s.count.nixl.Add(uint64(n))
}

// inMemory is where a piece of a root in memory is, nil if NIXL does not have all of it. It stays there while its lease lasts.
func (s service) inMemory(piece *store.Piece) (parts []*proto.PlacedPart) {
	segments, err := staging.MemoryOf(piece.File(), piece.Size())
	if err != nil {
		return nil
	}
	left := piece.Size()
	for _, mem := range segments {
		mem = mem[:min(int64(len(mem)), left)]
		if len(mem) == 0 {
			break
		}
		if !s.owner.nixl.agent.Has(mem) {
			return nil
		}
		parts, left = append(parts, partOf(mem)), left-int64(len(mem))
	}
	if left > 0 {
		return nil
	}
	return parts
}

func partOf(mem []byte) *proto.PlacedPart {
	return &proto.PlacedPart{Address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), Bytes: uint64(len(mem))}
}

// inSlot brings the first bytes [off, end) of a piece to a slot, or those of no piece.
func (s service) inSlot(ctx context.Context, piece *store.Piece, off, end int64) (*proto.PlaceResponse, error) {
	slot, err := s.takeSlot(ctx)
	if err != nil {
		return nil, status.Error(codes.ResourceExhausted, "all memory for others is in use")
	}
	from, n := pages(off, end, placeBytes)
	if n <= off-from {
		slot.Release()
		return nil, status.Error(codes.OutOfRange, "no bytes")
	}
	if piece != nil {
		if err := readPages(piece, slot.Bytes(), from, n); err != nil {
			s.releaseAfter(slot, err)
			return nil, status.Error(codes.DataLoss, err.Error())
		}
	}
	if err := s.pace.waitOf(ctx, slot.who, n); err != nil {
		slot.Release()
		return nil, err
	}
	s.sent(n - (off - from))
	mem := slot.Bytes()[off-from : n]
	return &proto.PlaceResponse{Parts: []*proto.PlacedPart{partOf(mem)}, Slot: s.shelf.lend(slot), Time: durationpb.New(placeTime)}, nil
}

// takeSlot takes a slot, if there is one soon.
func (s service) takeSlot(ctx context.Context) (slot takenSlot, err error) {
	soon, stop := context.WithTimeout(ctx, s.shelf.patience)
	defer stop()
	slot.of, slot.who = s.lending, s.owner.callerOf(ctx)
	if err = s.await(soon, slot.who, places); err != nil {
		return slot, err
	}
	if slot.Slot, err = s.shelf.slots.Acquire(soon); err != nil {
		s.back(slot.who, places)
	}
	return slot, err
}

// releaseAfter gives a slot back once a read that failed does not use it any more.
func (s service) releaseAfter(slot takenSlot, failed error) {
	var held staging.Held
	if !errors.As(failed, &held) {
		slot.Release()
		return
	}
	s.owner.work.Go(func() {
		select {
		case <-held.Ended():
			slot.Release()
		case <-s.owner.run.Done():
		}
	})
}
