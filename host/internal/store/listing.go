package store

import (
	"bytes"
	"context"
	"errors"
	"math/bits"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// listing is a scan by names and sizes. An entry is served and evicted from then on if all of its pieces have built-in names.
// Parent, depth and tenant are only in the headers, which are read later: see describe. The headers of all other files are read
// at once.
type listing struct {
	*scan
	heads errgroup.Group            // readers of headers of files that are not entered by name
	whole map[*catalog.Class]uint64 // ranks that make an entry complete, by class

	foreign string // directory of another root that was met
	head    pieceformat.Header
	keyLen  uint32
	stem    []byte  // name up to the rank of the pieces collected so far
	ranks   []int64 // sizes of these pieces by rank; -1 if missing
}

// list scans every file.
func (c *scan) list(ctx context.Context, from lister) error {
	l := &listing{scan: c, whole: map[*catalog.Class]uint64{}}
	l.heads.SetLimit(c.by.root.store.cfg.ScanWorkers)
	err := from.List(ctx, c.by.kept.Path, l.found)
	l.enter()
	return errors.Join(err, l.heads.Wait(), c.short)
}

func (l *listing) found(rel string, size int64, modified time.Time) {
	if l.hidden(rel) {
		return
	}
	l.by.count.Scanned.Add(1)
	h, keyLen, builtin := pieceformat.ParseBuiltin([]byte(rel))
	if !builtin || h.Rank >= kv.MaxRanks {
		if _, temp := pieceformat.ParseTemp(rel[strings.LastIndexByte(rel, '/')+1:]); !temp && strings.Contains("/"+rel, "/.") {
			l.by.count.Foreign.Add(1)
			return
		}
		l.lookAt(rel)
		return
	}
	if stem := rel[:strings.LastIndexByte(rel, 'r')]; !bytes.Equal(l.stem, []byte(stem)) {
		l.enter()
		l.stem, l.head, l.keyLen = append(l.stem[:0], stem...), h, keyLen
	}
	for uint32(len(l.ranks)) <= h.Rank {
		l.ranks = append(l.ranks, -1)
	}
	l.ranks[h.Rank] = size
	l.head.Pieces |= 1 << h.Rank
	l.head.StoreTime = max(l.head.StoreTime, modified.UnixNano())
}

// lookAt reads the header of a file that is not entered by its name.
func (l *listing) lookAt(rel string) {
	l.heads.Go(func() error {
		l.look(rel)
		return nil
	})
}

// hidden reports whether a file is in a directory that scans skip.
func (l *listing) hidden(rel string) bool {
	if l.foreign != "" && strings.HasPrefix(rel, l.foreign) {
		return true
	}
	if at := strings.Index("/"+rel, "/"+pieceformat.MetaDir+"/"); at > 0 {
		l.foreign = rel[:at]
		l.skipped(strings.TrimSuffix(l.foreign, "/"), staging.ErrForeign)
		return true
	}
	dir := rel[:strings.LastIndexByte(rel, '/')+1]
	return strings.Contains("/"+dir, "/.")
}

// enter enters the entry of the pieces collected so far.
func (l *listing) enter() {
	if len(l.ranks) == 0 {
		return
	}
	cl, err := l.by.kept.Catalog.ClassFor(&l.head)
	whole := err == nil && cl.Namespace.KeyLen == l.keyLen && l.wants(cl) == l.head.Pieces
	if !whole || !l.AddListed(cl, &l.head, l.ranks) {
		for rank, size := range l.ranks {
			if size >= 0 {
				l.lookAt(string(pieceformat.AppendBuiltin(nil, l.head.Namespace, l.keyLen, &l.head.Key, l.head.Group, uint32(rank))))
			}
		}
	}
	l.stem, l.ranks = l.stem[:0], l.ranks[:0]
}

// wants returns the ranks that make an entry of a class complete. It reads them from the header of the first such piece.
func (l *listing) wants(cl *catalog.Class) uint64 {
	ranks := l.whole[cl]
	if ranks == 0 {
		name := cl.Builtin(&l.head.Key, uint32(bits.TrailingZeros64(l.head.Pieces)))
		if h, _, err := l.by.kept.Look(l.by.kept.Slash + name); err == nil {
			ranks = h.Pieces
			l.whole[cl] = ranks
		}
	}
	return ranks
}

// describeEvery is the pause before headers that could not be read are tried again.
const describeEvery = 10 * time.Second

// describe reads a header of each entry that was entered by its name, the oldest entries first.
func (r *recovery) describe(ctx context.Context) {
	r.set.Lock()
	list := r.set.Index.ByLastTouch()
	r.set.Unlock()
	for {
		r.set.Lock()
		list = slices.DeleteFunc(list, func(slot uint32) bool { return !r.set.Index.At(slot).Is(index.Live | index.Listed) })
		r.set.Unlock()
		if len(list) == 0 {
			return
		}
		r.describeAll(ctx, list)
		select {
		case <-ctx.Done():
			return
		case <-time.After(describeEvery):
		}
	}
}

func (r *recovery) describeAll(ctx context.Context, list []uint32) {
	var work errgroup.Group
	work.SetLimit(r.root.store.cfg.ScanWorkers)
	for _, slot := range list {
		if ctx.Err() != nil || !r.kept.Health.Serves() {
			break
		}
		work.Go(func() error {
			r.describeOne(slot)
			return nil
		})
	}
	_ = work.Wait()
}

// describeOne reads the header of a piece of an entry. If the file is missing or wrong, the entry is dropped, as at a load.
func (r *recovery) describeOne(slot uint32) {
	s := r.set
	s.Lock()
	e := s.Index.At(slot)
	if !e.Is(index.Live|index.Listed) || e.Any(index.Evicting|index.Detached) {
		s.Unlock()
		return
	}
	m, cl, key := entries.Mark{Slot: slot, Fingerprint: s.Index.Fingerprint(slot)}, s.ClassOf(slot), s.Index.Key(slot)
	rank := uint32(bits.TrailingZeros64(s.Index.Pieces(slot)))
	s.Unlock()
	name := r.kept.Slash + cl.Builtin(&key, rank)
	h, _, err := r.kept.Look(name)
	if err == nil && !cl.IsPiece(&h, &key, rank) {
		err = pieceformat.ErrWrongPiece
	}
	if err != nil {
		_ = r.root.unopened(m, rank, name, err)
		return
	}
	s.Describe(m, &h)
}
