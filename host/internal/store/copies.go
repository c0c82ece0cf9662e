package store

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
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

// offer offers a copy of the i-th entry of a lease to the nearest level. It returns nil if the entry is there already, is being
// moved, or is not taken.
func (l *Lease) offer(i int, kind moves.Kind) *moves.Entry {
	nearest, g := l.store.levels[0], l.grants[i]
	if g.Slot == index.None || l.store.roots[g.Root].level == nearest {
		return nil
	}
	r := l.store.roots[g.Root]
	r.Lock()
	m := r.Moves.Copy(g.Slot)
	r.Unlock()
	if m == nil {
		return nil
	}
	v := &moves.Entry{Move: m, Kind: kind, From: &r.origin, To: nearest}
	if kind == moves.Prefetch {
		v.Then = func() { l.came(i, nearest, true) }
	}
	if !v.Offer(l.store.mover) {
		return nil
	}
	return v
}

// promote offers copies of a lease's entries when the lease ends. Entries from farther levels are offered to the nearest level,
// even if loading them from there was no faster than computing them. Loaded entries of the nearest level are offered to the
// next one. The lease still holds its pins.
func (l *Lease) promote(loaded bool) {
	if len(l.store.levels) < 2 {
		return
	}
	for i, g := range l.grants {
		if g.Slot == index.None {
			continue
		}
		if r := l.store.roots[g.Root]; r.level != l.store.levels[0] {
			l.offer(i, moves.Promotion)
		} else if loaded {
			r.keep(entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, WriteHits)
		}
	}
}

// prefetch requests copies in the nearest level of a new lease's entries in farther levels. The lease switches to each copy
// when it has arrived, and until then loads the entry from where it was found.
func (l *Lease) prefetch() {
	for i := range l.grants {
		v := l.offer(i, moves.Prefetch)
		if v == nil {
			continue
		}
		l.mu.Lock()
		if l.coming == nil {
			l.coming = map[int]*moves.Entry{}
		}
		l.coming[i] = v
		l.mu.Unlock()
	}
}

// endPrefetch cancels the copies that have not arrived.
func (l *Lease) endPrefetch(coming map[int]*moves.Entry) {
	if len(coming) == 0 {
		return
	}
	for _, v := range coming {
		v.Cancel()
	}
	l.store.mover.Prune()
}

// came pins a copy of the i-th entry in a level for the lease, unless the lease has ended or has a nearer copy. It reports
// whether it did.
func (l *Lease) came(i int, to *level, prefetched bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if prefetched {
		delete(l.coming, i)
	}
	_, has := l.near[i]
	fp := l.grants[i].Fingerprint
	for _, place := range to.places {
		r := l.store.roots[place]
		if slot, pinned := r.PinCopy(fp, prefetched, !l.over && !has); pinned {
			if l.near == nil {
				l.near = map[int]grant{}
			}
			l.near[i] = grant{Fingerprint: fp, Slot: slot, Root: place}
			return true
		}
	}
	return false
}

// Approach pins the nearest complete copy of the i-th entry, which may have come nearer since the lookup. A load calls it
// before it opens the pieces. Afterwards Root returns the root from which they are read, and Open does not search the levels.
func (l *Lease) Approach(i int) {
	if len(l.store.levels) < 2 || !l.Has(i) {
		return
	}
	at := l.store.roots[l.granted(i).Root].level
	for _, level := range l.store.levels {
		if level == at || l.came(i, level, false) {
			return
		}
	}
}
