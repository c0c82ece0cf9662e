package entries

import (
	"context"
	"fmt"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// New describes an entry to insert, with its first piece.
type New struct {
	Fingerprint uint64
	Class       *catalog.Class
	Key         *kv.Key
	Parent      uint64 // fingerprint
	Depth       uint32
	Tenant      uint16 // number of the tenant
	Rank        uint32
	Reserved    uint64 // ranks with reserved bytes
	Stored      int64  // store time
	Request     uint32
	Copied      bool // copied from another level
}

// Insert adds an entry, pinned by the put of its first piece. Its bytes must be in the account.
func (s *Set) Insert(n *New) (slot uint32, err error) {
	slot = s.Index.Add(n.Fingerprint, index.Owner{Class: n.Class.ID, Tenant: n.Tenant}, n.Key, n.Parent, n.Depth)
	if slot == index.None {
		return slot, fmt.Errorf("%w: the index cannot tell %s from others", capacity.ErrNoSpace, n.Key)
	}
	n.Class.Ref() // reference of the entry
	s.Hits.forget(slot)
	bytes := int64(bits.OnesCount64(n.Reserved)) * n.Class.FileBytes()
	s.Index.SetUnits(slot, uint32(bytes/abi.SizeUnit))
	s.Index.ReservePieces(slot, n.Reserved)
	s.expire(slot, n.Class, n.Stored)
	s.flights[slot] = flight{}.with(n.Rank, n.Copied)
	s.Index.Touch(slot)
	s.Evictor.Announce(abi.OpInsert, slot, n.Fingerprint, n.Request)
	s.Evictor.Pin(slot, n.Fingerprint, n.Request)
	return slot, nil
}

// Join adds a piece to the entry of its key and pins the entry. slot is [index.None] if there is no entry. The error is
// [ErrResident] if the piece is present or being written. Join waits until an entry that is being evicted has left the table,
// unless leaving returns an error. The lock is released during the wait.
func (s *Set) Join(
	ctx context.Context, fp uint64, cl *catalog.Class, key *kv.Key, rank uint32, copied bool, leaving func() error,
) (slot uint32, err error) {
	var unwatch func() bool
	defer func() {
		if unwatch != nil {
			unwatch()
		}
	}()
	for {
		slot := s.Index.Find(fp, cl.Base, key)
		if slot == index.None {
			return slot, nil
		}
		e, f := s.Index.At(slot), s.flights[slot]
		if e.Is(index.Evicting) && f.ranks == 0 {
			if err := ctx.Err(); err != nil {
				return index.None, err
			}
			if err := leaving(); err != nil {
				return index.None, err
			}
			if unwatch == nil {
				unwatch = context.AfterFunc(ctx, func() {
					s.Lock() // so that the broadcast cannot come between the check of ctx and the wait
					defer s.Unlock()
					s.reaped.Broadcast()
				})
			}
			s.reaped.Wait() // its files are being unlinked
			continue
		}
		if e.Is(index.Evicting) || (s.Index.Pieces(slot)|f.ranks)&(1<<rank) != 0 {
			return index.None, ErrResident
		}
		if e.Is(index.Moving) {
			s.Moves.stay(slot)
		}
		s.flights[slot] = f.with(rank, copied)
		s.Evictor.Pin(slot, fp, 0)
		return slot, nil
	}
}

// Extend reserves another piece of an entry. The caller must have reserved the bytes of the piece in the account.
func (s *Set) Extend(slot, rank uint32, bytes int64) {
	s.Index.Resize(slot, bytes)
	s.Index.ReservePieces(slot, 1<<rank)
}

// Unreserve releases the bytes of a piece that will not be written.
func (s *Set) Unreserve(slot, rank uint32, bytes int64) {
	if s.Index.Missing(slot)&(1<<rank) == 0 || s.Index.Pieces(slot)&(1<<rank) != 0 {
		return
	}
	s.Index.UnreservePiece(slot, rank)
	Rebook(s, slot, max(0, s.Index.Bytes(slot)-bytes))
}

// Written enters a published piece with its name, which is empty for the built-in one. The piece used diff bytes more than were
// reserved. The entry is complete if it has all of ranks. It returns false if a scan has found the piece with another name at
// the same time. That file then belongs to the entry and its bytes are in the account, so the caller must remove its own file.
func (s *Set) Written(slot, rank uint32, name string, ranks uint64, parent kv.Key, diff int64) bool {
	e := s.Index.At(slot)
	if s.Index.Pieces(slot)&(1<<rank) != 0 {
		return s.Index.HasName(slot, rank, name)
	}
	if name != "" {
		s.Index.AddName(slot, pieceformat.Name{Rank: rank, Path: name})
	}
	s.Index.PieceWritten(slot, rank)
	if s.Index.Pieces(slot)&ranks == ranks && !e.Is(index.Complete) {
		e.Set(index.Complete)
		s.completed(slot, parent)
	}
	Rebook(s, slot, max(0, s.Index.Bytes(slot)+diff))
	s.Count.Published++
	return true
}

// Rebook changes the bytes of an entry in the index and in the account.
func Rebook(s *Set, slot uint32, bytes int64) {
	diff := bytes - s.Index.Bytes(slot)
	s.Index.Resize(slot, diff)
	s.Account.Commit(s.Index.Owner(slot).Tenant, diff)
	if s.Index.At(slot).Is(index.Evicting) {
		s.Account.Leave(capacity.Entries, diff)
	}
}

// EndWrite ends the writing of a piece and the put's pin. An entry without any piece, present or being written, is removed.
func (s *Set) EndWrite(m Mark, rank uint32) {
	f := s.flights[m.Slot]
	f.ranks, f.copies = f.ranks&^(1<<rank), f.copies&^(1<<rank)
	s.flights.set(m.Slot, f)
	s.reap(m.Slot) // a put of the same key need not wait for a reader that keeps its pin for long
	if e := s.Index.At(m.Slot); !e.Is(index.Evicting) && f.ranks == 0 && s.Index.Pieces(m.Slot) == 0 {
		v := s.BeginEvict(m.Slot)
		s.FinishEvict(&v)
	}
	s.Unpin(m)
}
