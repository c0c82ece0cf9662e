package store

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Package moves copies entries by reading them like a load and writing them like a put.

// movedPiece is the source of a copy.
type movedPiece struct{ *Piece }

func (p movedPiece) ReadAt(b []byte, off int64) (int, error) { return p.file.ReadAt(b, off) }
func (p movedPiece) Cancelled() bool                         { return p.move.Cancelled() }

// openMoved opens a piece of a pinned entry for a copy.
func (r *root) openMoved(m *entries.Move, rank uint32) (moves.Piece, error) {
	p := &Piece{root: r, mark: m.Mark, rank: rank, move: m}
	if err := p.pin(); err != nil {
		return nil, err
	}
	err := r.kept.Catalog.Reopen(r.store.run, p.class)
	if err == nil {
		err = p.open()
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return movedPiece{p}, nil
}

// movedTo is the destination of a copy.
type movedTo struct {
	staging.File
	*Put
	decodes bool
}

// Decodes reports whether compressed pieces are copied decompressed, as version 1. This is so for memory, from which
// uncompressed pieces load faster.
func (t movedTo) Decodes() bool { return t.decodes }

// Name returns the name that the place policy gave the copy. It is empty for the built-in name.
func (t movedTo) Name() string { return t.Put.name }

func (t movedTo) Commit(ctx context.Context) error {
	if t.Compresses() { // the file was created with the largest possible size
		if err := staging.Shrink(t.File, t.size); err != nil {
			return err
		}
	}
	return t.Publish(ctx)
}

// Begin implements [moves.Level].
func (l *level) Begin(ctx context.Context, e *moves.Entry, h *pieceformat.Header) (moves.Target, error) {
	put, err := l.store.Put(ctx, PutRequest{
		Namespace: e.Namespace, Group: h.Group, Parent: h.Parent, Key: h.Key, Depth: h.Depth, Rank: h.Rank, Ranks: e.Pieces,
		Tenant: h.Tenant, copy: &copyOf{e, h, l},
	})
	if errors.Is(err, moves.ErrBehind) && !e.Here { // offer the entries that it waits for before the next attempt
		for _, r := range l.roots {
			r.leaving.Step()
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
	r := put.root
	decodes := r.cfg.Volatile && !(r.cfg.Compressed && put.class.Namespace.Compression.Keeps(r.meter.gain))
	switch put.size = h.FileBytes(); {
	case decodes:
		put.size = pieceformat.FileBytes(put.class.Plan)
	case put.Compresses():
		put.size = put.FileBytes()
	}
	// A file in memory that grew in parts would be scattered over as many runs, and a GPU copies each run separately. So all of
	// its memory is allocated now, as for a store.
	if _, err := staging.MemoryOf(f, put.size); err != nil {
		put.Abort(err)
		return nil, err
	}
	return movedTo{f, put, decodes}, nil
}

// Keep copies the extents [lo, hi), which a load has verified, to the nearest level if the piece is being copied there. src
// holds the payload from offset base on.
func (p *Piece) Keep(lo, hi int, src []byte, base int64) {
	if !p.isLoad || p.head.Compressed || p.root.level == p.root.store.levels[0] {
		return
	}
	p.nearer.Do(p.comeNearer)
	if p.copied != nil {
		p.copied.keep(lo, hi, src, base)
	}
}

// comeNearer begins the copy if the nearest level is in memory and wants the piece.
func (p *Piece) comeNearer() {
	r, nearest := p.root, p.root.store.levels[0]
	if near := nearest.roots[0].cfg; !near.Volatile || near.Compressed { // a copy that must be compressed is made in the background
		return
	}
	size := p.header.FileBytes()
	if room := int64(nearingShare * float64(nearest.roots[0].cfg.Capacity)); nearest.nearing.Add(size) > room {
		nearest.nearing.Add(-size)
		return
	}
	defer func() {
		if p.copied == nil {
			nearest.nearing.Add(-size)
		}
	}()
	r.Lock()
	if r.Index.Pieces(p.mark.Slot) != 1<<p.rank {
		r.Unlock()
		return
	}
	m := r.Moves.Take(p.mark.Slot)
	r.Unlock()
	if m == nil {
		return
	}
	v := &moves.Entry{Move: m, Kind: moves.Promotion, From: &r.origin, To: nearest}
	if !v.BeginHere() {
		return
	}
	if v.Pieces != 1<<p.rank { // a piece of another rank has arrived in between
		v.EndHere(moves.ErrCancelled)
		return
	}
	to, err := nearest.Begin(context.Background(), v, &p.header)
	if err != nil {
		v.EndHere(err)
		return
	}
	t := to.(movedTo)
	memory, err := staging.MemoryOf(t.File, t.size)
	if err != nil || memory == nil || t.Compresses() {
		t.Abort(moves.ErrCancelled)
		v.EndHere(moves.ErrCancelled) // a background copy compresses the piece
		return
	}
	extents := len(p.head.Plan.Extents())
	p.copied = &nearing{entry: v, level: nearest, size: size, put: t.Put, memory: memory, head: &p.head, have: make([]bool, extents), left: extents}
}
