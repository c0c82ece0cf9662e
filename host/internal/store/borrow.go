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

// The root for entries that other hosts lend is empty when a store is opened and when it is closed, and takes no stores.
// Entries are added by [Store.Borrow]. They are removed by [Store.GiveBack] or as victims. Unlinking their files only forgets
// them.

// Loan is a set of entries that another host lends. All have pieces of the same ranks.
type Loan struct {
	Namespace *catalog.Namespace
	Group     uint32
	Tenant    uint32
	Ranks     uint64
	Entries   []LentEntry
	// Name is called with the name of each piece's file before the file may be opened. The lock of the root is held.
	Name func(entry int, rank uint32, bytes int64, name string)
}

// LentEntry is an entry with the sizes of its pieces' files, in the order of the ranks.
type LentEntry struct {
	Key   kv.Key
	Bytes []int64
}

// Borrowed identifies an entry of a loan.
type Borrowed = entries.Mark

// Borrow makes lent entries visible to lookups. It skips entries that exist already, and stops when the root is full.
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

// borrow enters one entry unless its key exists. The lock must be held.
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

// GiveBack removes borrowed entries. It skips entries in use unless all is set. It returns the entries that remain.
func (s *Store) GiveBack(list []Borrowed, all bool) []Borrowed {
	r := s.beyond.roots[0]
	return slices.DeleteFunc(list, func(m Borrowed) bool {
		r.Lock()
		stands := r.Stands(m)
		used := stands && !r.Unused(m.Slot)
		r.Unlock()
		if stands && (all || !used) {
			r.drop(m)
		}
		return !used || all
	})
}

// Lends reports whether this store lends entries at all.
func (s *Store) Lends() bool { return len(s.lent) > 0 }

// Lendable lists the entries that Lend may find, in the way of Snapshot.
func (s *Store) Lendable(yield func([]entries.Change) bool) {
	for _, l := range s.lent {
		if !snapshot(l.roots, yield) {
			return
		}
	}
}

// Lend looks up entries for another host, within that host's share. The namespace is given by its digest and may be unknown
// here.
func (s *Store) Lend(ns kv.Digest, to Share, q LookupRequest) (*Lease, error) {
	q.Namespace, q.lend = s.catalog.Known(ns), to
	if !s.Lends() || q.Namespace == nil || q.Namespace.Class(q.Group) == nil {
		return &Lease{store: s}, nil
	}
	return s.Lookup(q)
}

// ClassOf returns the class of a group, given the digest of its namespace, or nil if it is unknown.
func (s *Store) ClassOf(ns kv.Digest, group uint32) *catalog.Class {
	if known := s.catalog.Known(ns); known != nil {
		return known.Class(group)
	}
	return nil
}

// Size returns the size of the file of the i-th key's piece. It does not count as a load.
func (l *Lease) Size(i int, rank uint32) (int64, error) {
	if !l.Has(i) {
		return 0, fmt.Errorf("%w: it does not cover key %d", ErrLeaseOver, i)
	}
	p, err := l.hold(l.granted(i), rank, false)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	err = p.open()
	return p.size, err
}
