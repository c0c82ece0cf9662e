package store

import (
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// The root of what other hosts lend is empty at both ends of the host's life and takes no stores. Its entries come by [Store.Borrow]
// and leave by [Store.GiveBack], or as victims; to unlink their files is to forget them.

// Loan is entries that another host lends, with the pieces of the same ranks.
type Loan struct {
	Namespace *catalog.Namespace
	Group     uint32
	Tenant    uint32
	Ranks     uint64
	Entries   []LentEntry
	// Name is told the name of each piece's file before it may be opened, with the lock of the root held.
	Name func(entry int, rank uint32, bytes int64, name string)
}

// LentEntry is an entry with the bytes of its pieces' files, by rank.
type LentEntry struct {
	Key   kv.Key
	Bytes []int64
}

// Borrowed names an entry of a loan.
type Borrowed = entries.Mark

// Borrow lets lookups find what another host lends. It leaves out what is there already, and stops where the root is full.
func (s *Store) Borrow(l *Loan) (list []Borrowed, err error) {
	if s.closed.Load() || s.beyond == nil {
		return nil, ErrClosed
	}
	r := s.beyond.roots[0]
	cl, err := l.Namespace.OpenClass(l.Group)
	if err != nil {
		return nil, err
	}
	tenant := s.catalog.Tenants.Number(l.Tenant)
	sight := entries.NewScan(&r.Set, true)
	for i := range l.Entries {
		e := &l.Entries[i]
		var bytes int64
		for _, n := range e.Bytes {
			bytes += n
		}
		if r.Account.Figures().Used+bytes > r.cfg.Capacity || bytes <= 0 {
			break
		}
		r.Lock()
		if m := r.borrow(sight, cl, tenant, l, i); m.Slot != index.None {
			list = append(list, m)
		}
		r.Unlock()
	}
	return list, nil
}

// borrow enters one entry, unless there is one of its key. The lock is held.
func (r *root) borrow(sight *entries.Scan, cl *catalog.Class, tenant uint16, l *Loan, i int) Borrowed {
	e := &l.Entries[i]
	fp := cl.Printer.Print(&e.Key)
	if r.Index.Find(fp, cl.Base, &e.Key) != index.None || r.Index.Len() >= r.Index.Max() {
		return Borrowed{Slot: index.None}
	}
	n := 0
	for rank := range entries.Ranks(l.Ranks) {
		l.Name(i, rank, e.Bytes[n], r.path("", cl, &e.Key, rank))
		sight.AddOf(tenant, cl, &pieceformat.Header{
			Namespace: cl.Namespace.Digest, Group: l.Group, Rank: rank, Key: e.Key, Tenant: l.Tenant, Pieces: 1 << rank,
			StoreTime: r.store.cfg.Now().UnixNano(), DataOffset: pieceformat.Page, Payload: e.Bytes[n] - pieceformat.Page,
		}, "", e.Bytes[n])
		n++
	}
	slot := r.Index.Find(fp, cl.Base, &e.Key)
	if slot != index.None && !r.Index.At(slot).Is(index.Announced) {
		r.Index.Touch(slot)
		r.Evictor.Announce(abi.OpResident, slot, fp, 0)
	}
	return Borrowed{Slot: slot, Fingerprint: fp}
}

// GiveBack removes entries that were borrowed, but for those that are in use unless all are to go. It returns what is left.
func (s *Store) GiveBack(list []Borrowed, all bool) []Borrowed {
	r := s.beyond.roots[0]
	return slices.DeleteFunc(list, func(m Borrowed) bool {
		r.Lock()
		stands := r.Stands(m)
		used := stands && !r.Unused(m.Slot)
		r.Unlock()
		if stands && (all || !used) {
			r.drop(m, 0)
		}
		return !used || all
	})
}

// Lends says whether Lend may ever find something.
func (s *Store) Lends() bool { return len(s.lent) > 0 }

// Lendable lists what Lend may find, as Snapshot does.
func (s *Store) Lendable(yield func([]entries.Change) bool) {
	for _, l := range s.lent {
		if !snapshot(l.roots, yield) {
			return
		}
	}
}

// Lend looks entries up for another host, within its share, by the digest of a namespace that need not be known here.
func (s *Store) Lend(ns kv.Digest, to Share, q LookupRequest) (*Lease, error) {
	q.Namespace, q.lend = s.catalog.Known(ns), to
	if !s.Lends() || q.Namespace == nil || q.Namespace.Class(q.Group) == nil {
		return &Lease{store: s}, nil
	}
	return s.Lookup(q)
}

// ClassOf is what is known of a group's pieces by their namespace's digest, or nil.
func (s *Store) ClassOf(ns kv.Digest, group uint32) *catalog.Class {
	if known := s.catalog.Known(ns); known != nil {
		return known.Class(group)
	}
	return nil
}

// Size is the size of the file of the i-th key's piece, which is not taken for one that is loaded.
func (l *Lease) Size(i int, rank uint32) (int64, error) {
	if !l.Has(i) {
		return 0, fmt.Errorf("%w: it does not cover key %d", ErrLeaseOver, i)
	}
	g := l.granted(i)
	p := &Piece{root: l.store.roots[g.Root], mark: entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, rank: rank}
	l.mu.Lock()
	over, err := l.over, error(nil)
	if !over {
		err = p.pin()
	}
	l.mu.Unlock()
	if over {
		return 0, ErrLeaseOver
	} else if err != nil {
		return 0, err
	}
	defer p.Close()
	err = p.open()
	return p.size, err
}
