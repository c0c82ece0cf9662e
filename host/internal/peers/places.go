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
	mostPlaced = 16                  // number of slots
	placeBytes = 4<<20 + 2*pageBytes // bytes of a slot: the largest read of a load, extended to whole pages at both ends
	// placeTime is the time for which a slot is lent. It covers the longest READ: the borrower abandons one after stall and
	// discards its bytes.
	placeTime = 2*stall + time.Second
	slotWait  = 100 * time.Millisecond // longest wait for a slot; reads from other slots end within a few milliseconds
)

// shelf is registered memory into which this host copies pieces of files, so that peers can read them by NIXL.
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

// takenSlot is a slot that is charged to a caller's share.
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

// lend stores a slot under a random number, so that no other peer can guess it.
func (s *shelf) lend(slot takenSlot) (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for taken := true; n == 0 || taken; _, taken = s.out[n] {
		n = rand.Uint64()
	}
	s.out[n] = lentSlot{slot, time.Now().Add(placeTime)}
	return n
}

// done releases slots that the borrower no longer needs.
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

// end releases slots that have been lent for longer than placeTime.
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

// close unmaps the slots. The agent must be closed. A slot that a hung file read still uses is unmapped when that read ends.
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

// Place implements [proto.PeerServiceServer].
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

// inMemory returns the addresses of a piece that lies in a root in memory. It returns nil if any part of the piece is not
// registered with NIXL. The piece stays at these addresses for as long as its lease lasts.
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

// inSlot copies the bytes [off, end) of a piece to a slot, or the first of them if the slot is smaller. With a nil piece it
// lends a slot without copying, for a measurement.
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

// takeSlot takes a slot from the caller's share and waits for it only for a short time.
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

// releaseAfter releases a slot after a failed read. If the read still uses the slot, it waits in the background for the end of
// the read.
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
