package peers

import (
	"context"
	"errors"
	"unsafe"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// Place implements [proto.PeerServiceServer].
func (l *lending) Place(ctx context.Context, q *proto.PlaceRequest) (*proto.PlaceResponse, error) {
	if l.shelf == nil {
		return nil, status.Error(codes.FailedPrecondition, "this host has no NIXL")
	}
	l.shelf.done(q.GetDone())
	if q.GetLease() == 0 {
		return l.inSlot(ctx, nil, 0, int64(min(q.GetBytes(), placeBytes)))
	}
	piece, off, end, err := l.open(q.GetLease(), q.GetIndex(), q.GetRank(), q.GetOffset(), q.GetBytes())
	if err != nil {
		return nil, err
	}
	defer piece.Close()
	if parts := l.inMemory(piece); parts != nil {
		if err := l.pace.waitOf(ctx, l.owner.callerOf(ctx), piece.Size()); err != nil {
			return nil, err
		}
		l.sent(piece.Size())
		return &proto.PlaceResponse{Parts: parts}, nil
	}
	return l.inSlot(ctx, piece, off, end)
}

func (l *lending) sent(n int64) {
	l.count.bytes.Add(uint64(n))
	l.count.nixl.Add(uint64(n))
}

// inMemory returns the addresses of a piece that lies in a root in memory. It returns nil if any part of the piece is not
// registered with NIXL. The piece stays at these addresses for as long as its lease lasts.
func (l *lending) inMemory(piece *store.Piece) (parts []*proto.PlacedPart) {
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
		if !l.owner.nixl.agent.Has(mem) {
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
func (l *lending) inSlot(ctx context.Context, piece *store.Piece, off, end int64) (*proto.PlaceResponse, error) {
	slot, err := l.takeSlot(ctx)
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
			l.releaseAfter(slot, err)
			return nil, status.Error(codes.DataLoss, err.Error())
		}
	}
	if err := l.pace.waitOf(ctx, slot.who, n); err != nil {
		slot.Release()
		return nil, err
	}
	l.sent(n - (off - from))
	mem := slot.Bytes()[off-from : n]
	return &proto.PlaceResponse{Parts: []*proto.PlacedPart{partOf(mem)}, Slot: l.shelf.lend(slot), Time: durationpb.New(placeTime)}, nil
}

// takeSlot takes a slot from the caller's share and waits for it only for a short time.
func (l *lending) takeSlot(ctx context.Context) (slot takenSlot, err error) {
	soon, stop := context.WithTimeout(ctx, l.shelf.patience)
	defer stop()
	slot.of, slot.who = &l.port, l.owner.callerOf(ctx)
	if err = l.await(soon, slot.who, places); err != nil {
		return slot, err
	}
	if slot.Slot, err = l.shelf.slots.Acquire(soon); err != nil {
		l.back(slot.who, places)
	}
	return slot, err
}

// releaseAfter releases a slot after a failed read. If the read still uses the slot, it waits in the background for the end of
// the read.
func (l *lending) releaseAfter(slot takenSlot, failed error) {
	var held staging.Held
	if !errors.As(failed, &held) {
		slot.Release()
		return
	}
	l.owner.work.Go(func() {
		select {
		case <-held.Ended():
			slot.Release()
		case <-l.owner.run.Done():
		}
	})
}
