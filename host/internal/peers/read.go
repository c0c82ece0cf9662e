package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// piece is a borrowed file.
type piece struct {
	loan  *loan
	entry uint32
	print uint64 // fingerprint of the entry; 0 if the piece was offered by a peer
	rank  uint32
	bytes int64
	ino   uint64

	placed atomic.Pointer[spot] // address in the lender's memory; nil if unknown
}

func (p *piece) info(dev uint64) staging.Info {
	return staging.Info{Size: p.bytes, Allocated: p.bytes, Dev: dev, Ino: p.ino, Links: 1, Owner: uint32(os.Geteuid()), Mode: 0o400}
}

// read reads bytes of a piece from its lender, by NIXL if possible.
func (p *piece) read(dst []byte, off int64) (err error) {
	x, all := p.loan.peer, len(dst)
	if err := x.owner.reads.wait(x.run, int64(all), x.owner.cfg.Budget/2); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	client, err := x.client(true)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(x.run)
	defer stop(nil)
	quiet := newSilence(min(stall, x.owner.cfg.Budget), stop)
	defer quiet.end()
	slow := time.AfterFunc(x.owner.cfg.Budget, func() { stop(fmt.Errorf("%w: not all bytes in %s", ErrAway, x.owner.cfg.Budget)) })
	defer slow.Stop()
	defer func() {
		if err == nil {
			x.count.bytes.Add(uint64(all))
			x.worked(reading)
			return
		}
		cause := context.Cause(ctx)
		_, refused := status.FromError(err) // the peer itself answered with an error
		refused = refused && cause == nil && status.Code(err) != codes.Unavailable
		var held staging.Held // the error of a READ already carries the cause
		if cause != nil && x.run.Err() == nil && !errors.As(err, &held) {
			err = cause
		}
		if !errors.Is(err, ErrMessage) {
			err = fmt.Errorf("%w: %s: %w", ErrAway, x.addr, err)
		}
		offered := p.loan.lasts == 0 // an offered loan ends soon, so NotFound is no failure
		if !p.loan.hearsay && (!offered || status.Code(err) != codes.NotFound) {
			x.failed(reading, time.Time{}, err)
			if refused { // A silent peer is not treated like this: it still has its entries when it goes on, and would not announce them again.
				x.owner.work.Go(func() { x.missed(p) }) // in the background: the reader holds the entry
			}
		}
	}()
	if did, err := p.readByNIXL(ctx, dst, off, quiet.heard); did {
		return err
	}
	stream, err := client.Fetch(ctx, &proto.FetchRequest{Lease: p.loan.lease, Index: p.entry, Rank: p.rank, Offset: uint64(off),
		Bytes: uint64(len(dst))}, grpc.ForceCodecV2(byParts))
	if err != nil {
		return err
	}
	for m := (parted{dst: dst}); len(m.dst) > 0; m.dst = m.dst[m.have:] {
		if err := stream.RecvMsg(&m); m.bad != nil {
			return m.bad
		} else if err != nil {
			return err
		}
		quiet.heard()
	}
	return nil
}

// readByNIXL reads bytes of a piece. If did is false, nothing was read and the caller fetches the bytes by gRPC.
func (p *piece) readByNIXL(ctx context.Context, dst []byte, off int64, heard func()) (did bool, err error) {
	x := p.loan.peer
	w := x.owner.nixl
	if w == nil || !w.agent.Has(dst) || x.left(p.loan) < x.owner.cfg.Budget {
		return false, nil
	}
	r, has := w.begin(ctx, x.agent())
	if r == nil {
		if has {
			x.count.fallbacks.Add(1)
		}
		return false, nil
	}
	kept := false // hold has taken over the places
	defer func() {
		if !kept {
			w.end(r)
		}
		if !did {
			x.count.fallbacks.Add(1)
		}
	}()
	for all := int64(len(dst)); len(dst) > 0; {
		parts, slot, err := p.place(ctx, off, int64(len(dst)))
		if err != nil {
			if code := status.Code(err); code != codes.ResourceExhausted && code != codes.NotFound && ctx.Err() == nil {
				w.doubt(r, err)
			}
			return ctx.Err() != nil, err
		}
		heard()
		n := int64(0)
		for i := range parts {
			n += parts[i].Bytes
		}
		read, err := w.agent.Read(dst[:n], r.name, parts)
		if err != nil { // the peer has unregistered the memory, or the connection is broken; the READ has not begun
			w.doubt(r, err)
			return false, err
		}
		if err := await(ctx, read); err != nil {
			if x.run.Err() == nil {
				w.doubt(r, err)
			}
			kept = true
			return true, w.hold(r, read, err)
		}
		heard()
		if slot != 0 {
			x.spend(slot)
		}
		if dst, off = dst[n:], off+n; len(dst) == 0 {
			x.count.nixl.Add(uint64(all))
		}
	}
	return true, nil
}

// place returns the address of bytes in the peer's memory. If they are in a slot, it may cover only the first of them.
func (p *piece) place(ctx context.Context, off, n int64) (parts []nixl.Part, slot uint64, err error) {
	if at := p.placed.Load(); at != nil && at.left.Add(-n) >= 0 {
		return from(at.parts, off, n), 0, nil
	}
	x := p.loan.peer
	client, err := x.client(true)
	if err != nil {
		return nil, 0, err
	}
	m, err := client.Place(ctx, &proto.PlaceRequest{Lease: p.loan.lease, Index: p.entry, Rank: p.rank, Offset: uint64(off), Bytes: uint64(n),
		Done: x.spent()})
	if err != nil {
		return nil, 0, err
	}
	most := n
	if m.GetSlot() == 0 {
		most = p.bytes
	}
	parts, sum, err := partsOf(m, most)
	switch {
	case err != nil:
		return nil, 0, err
	case m.GetSlot() != 0:
		return parts, m.GetSlot(), nil
	case sum != p.bytes:
		return nil, 0, fmt.Errorf("%w: a place of %d bytes for a piece of %d", ErrMessage, sum, p.bytes)
	}
	at := &spot{parts: parts}
	at.left.Store(p.bytes - n)
	p.placed.Store(at)
	return from(parts, off, n), 0, nil
}

// missed makes an entry a miss after its bytes did not come, until the peer announces the entry again.
func (x *peer) missed(p *piece) {
	x.mu.Lock()
	list := x.list
	x.mu.Unlock()
	if p.print == 0 || list == lists {
		return
	}
	x.owner.table.remove(p.print, list)
	x.giving.Lock()
	defer x.giving.Unlock()
	i := slices.IndexFunc(p.loan.entries, func(m store.Borrowed) bool { return m.Fingerprint == p.print })
	if i >= 0 {
		x.owner.store.GiveBack(p.loan.entries[i:i+1:i+1], true)
		p.loan.entries = slices.Delete(p.loan.entries, i, i+1)
	}
}
