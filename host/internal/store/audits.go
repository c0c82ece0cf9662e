package store

import (
	"context"
	"errors"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// objectFS is the part of a bucket's file system that a shared root needs in addition to files.
type objectFS interface {
	Control(name string, patience time.Duration) *s3fs.Control
	WriteWhile(may func() bool)
	lister
}

// run makes audits until the context is done.
func (a *audits) run(ctx context.Context) {
	tick := time.NewTicker(a.root.root.cfg.Poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.pass(ctx, 2*a.root.root.cfg.Poll)
		}
	}
}

// pass makes an audit if one is due. Before it reports unknown objects it waits for the given time, so that records of objects
// stored during the listing can arrive.
func (a *audits) pass(ctx context.Context, while time.Duration) {
	r := a.root
	ticket := r.member.Audit()
	if ticket == 0 {
		return
	}
	unknown := map[string]staging.Info{}
	named := a.named()
	if err := a.list(ctx, func(rel string, size int64, modified time.Time) {
		if _, known := a.slotOf(rel, named); !known {
			unknown[rel] = staging.Info{Size: size, Allocated: size, ModTime: modified}
		}
	}); err != nil {
		r.kept.Log.Warn("the bucket could not be listed; it is tried again", "error", err)
		return
	}
	if len(unknown) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(while):
		}
	}
	var strays []shared.Stray
	for rel, info := range unknown {
		if _, known := a.slotOf(rel, named); !known {
			strays = append(strays, shared.Stray{Path: r.kept.Slash + rel, Info: info})
		}
	}
	r.member.Audited(ticket, strays)
}

// list calls found for all objects except the store's own ones.
func (a *audits) list(ctx context.Context, found func(rel string, size int64, modified time.Time)) error {
	return a.root.root.cfg.FS.(objectFS).List(ctx, a.root.kept.Path, func(rel string, size int64, modified time.Time) {
		if !strings.HasPrefix(rel, pieceformat.MetaDir) {
			found(rel, size, modified)
		}
	})
}

// walk is a scan that reads the headers of unknown objects only. If the objects of an entry do not add up to its size, the
// entry is forgotten and its objects are read again.
func (a *audits) walk(ctx context.Context, c *scan) error {
	s, before, named := a.root.set, map[uint32]uint64{}, a.named()
	s.Lock()
	s.Index.Each(func(slot uint32, _ *index.Entry) { before[slot] = s.Index.Fingerprint(slot) })
	s.Unlock()
	sums := map[uint32]int64{}
	var unknown []string
	if err := a.list(ctx, func(rel string, size int64, _ time.Time) {
		if slot, known := a.slotOf(rel, named); known {
			sums[slot] += pieceformat.Padded(size)
		} else {
			unknown = append(unknown, rel)
		}
	}); err != nil {
		return err
	}
	for slot, fp := range before {
		s.Lock()
		if m := (entries.Mark{Slot: slot, Fingerprint: fp}); s.Stands(m) && !s.Busy(slot) && !s.Index.At(slot).Is(index.Evicting) &&
			s.Index.Bytes(slot) != sums[slot] {
			key := s.Index.Key(slot)
			unknown = append(unknown, filesOf(s.ClassOf(slot), &key, s.Index.Pieces(slot), s.Index.NamesOf(slot))...)
			entries.Forget(s, slot)
		}
		s.Unlock()
	}
	return c.fileAll(ctx, unknown)
}

// fileAll scans files, given by their paths below the root, several at a time.
func (c *scan) fileAll(ctx context.Context, list []string) error {
	var work errgroup.Group
	work.SetLimit(c.by.root.store.cfg.ScanWorkers)
	for _, rel := range list {
		work.Go(func() error {
			if ctx.Err() == nil {
				c.file(rel, files.KindOf(rel, true))
			}
			return nil
		})
	}
	return errors.Join(work.Wait(), ctx.Err(), c.short)
}

// named returns the slots of pieces with names that are not built-in ones, by path.
func (a *audits) named() map[string]uint32 {
	s, names := a.root.set, map[string]uint32{}
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, _ *index.Entry) {
		for _, n := range s.Index.NamesOf(slot) {
			names[n.Path] = slot
		}
	})
	return names
}

// slotOf returns the slot of the entry to which an object belongs, and whether it is known.
func (a *audits) slotOf(rel string, named map[string]uint32) (slot uint32, known bool) {
	if slot, known = named[rel]; known {
		return slot, true
	}
	h, _, ok := pieceformat.ParseBuiltin([]byte(rel))
	if !ok {
		return 0, false
	}
	cl, err := a.root.kept.Catalog.ClassFor(&h)
	if err != nil {
		return 0, false
	}
	s := a.root.set
	s.Lock()
	defer s.Unlock()
	slot = s.Index.Find(kv.Fingerprint(h.Namespace, h.Group, h.Key), cl.Base, &h.Key)
	return slot, slot != index.None && s.Index.Pieces(slot)&(1<<h.Rank) != 0
}
