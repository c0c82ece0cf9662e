package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// What package moves copies is read as by a load and written as by a put.

// copyOf marks the put of a piece that is copied.
type copyOf struct {
	entry  *moves.Entry
	header *pieceformat.Header
	level  *level
}

// movedPiece is a piece that is copied.
type movedPiece struct {
	*Piece
	move *entries.Move
}

func (p movedPiece) ReadAt(b []byte, off int64) (int, error) { return p.file.ReadAt(b, off) }
func (p movedPiece) Cancelled() bool                         { return p.move.Cancelled() }

// openMoved opens a piece of an entry that is pinned.
func (r *root) openMoved(m *entries.Move, rank uint32) (moves.Piece, error) {
	p := &Piece{root: r, mark: m.Mark, rank: rank}
	if err := p.pin(false); err != nil {
		return nil, err
	}
	if err := p.open(); err != nil {
		p.Close()
		return nil, err
	}
	return movedPiece{p, m}, nil
}

// movedTo is the put of a piece that is copied.
type movedTo struct {
	staging.File
	*Put
}

// Decodes says whether compressed pieces come as version 1.
func (t movedTo) Decodes() bool { return t.root.kind.decodes() }

// Name is the one that the place policy gave the copy.
func (t movedTo) Name() string { return t.Put.name }

func (t movedTo) Commit(ctx context.Context) error { return t.Publish(ctx) }

// Begin implements [moves.Level].
func (l *level) Begin(ctx context.Context, e *moves.Entry, h *pieceformat.Header) (moves.Target, error) {
	put, err := l.store.Put(ctx, PutRequest{
		Namespace: e.Namespace, Group: h.Group, Parent: h.Parent, Key: h.Key, Depth: h.Depth, Rank: h.Rank, Ranks: e.Pieces,
		Tenant: h.Tenant, copy: &copyOf{e, h, l},
	})
	if errors.Is(err, moves.ErrBehind) { // what it waits for is offered before it is tried again
		for _, r := range l.roots {
			r.kind.offer()
		}
	}
	if err != nil {
		return nil, err
	}
	f, err := put.File()
	if err != nil {
		put.Abort(err)
		return nil, err
	}
	to := movedTo{f, put}
	if put.size = h.FileBytes(); to.Decodes() {
		put.size = pieceformat.FileBytes(put.class.Plan)
	}
	return to, nil
}

// ways are the levels that the copy of an entry may go to: what leaves may go beyond the next one, as what is new.
func (l *level) ways(e *moves.Entry) []*level {
	at := slices.Index(l.store.levels, l)
	if e.Leaves() {
		return l.store.levels[at:]
	}
	return l.store.levels[at : at+1]
}

// DropPart implements [moves.Level].
func (l *level) DropPart(e *moves.Entry) {
	for _, way := range l.ways(e) {
		for _, r := range way.roots {
			if m, ok := r.Part(e.Fingerprint); ok {
				r.drop(m, 0)
			}
		}
	}
}

// Settle is for tests: it waits until everything has left that is to leave, and no move is under way.
func (s *Store) Settle(ctx context.Context) error {
	if s.mover == nil {
		return nil
	}
	return s.mover.Settle(ctx, func() {
		for _, r := range s.roots {
			r.kind.offer() // a copy that came may let others leave
		}
	})
}

// drain copies to the next level what roots would lose, within a time.
func (s *Store) drain(limit time.Duration) {
	if s.mover == nil || limit <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(s.run, limit)
	defer cancel()
	s.mover.Hurry()
	for _, r := range s.roots {
		r.kind.drain(ctx)
	}
}
