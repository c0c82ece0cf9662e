package store

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// backend is what a root's member asks of this host; see [shared.Backend].
type backend struct{ *sharedRoot }

func (r backend) classOf(ns kv.Digest, group uint32, key *kv.Key) (*catalog.Class, error) {
	h := pieceformat.Header{Namespace: ns, Group: group, Key: *key}
	cl, err := r.kept.Catalog.ClassFor(&h)
	if errors.Is(err, catalog.ErrUnknownNamespace) {
		if err = r.kept.loadNamespaces(); err == nil { // an engine of another host's has opened it
			cl, err = r.kept.Catalog.ClassFor(&h)
		}
	}
	return cl, err
}

// Learn implements [shared.Backend].
func (r backend) Learn(rec *shared.Record) bool {
	cl, err := r.classOf(rec.Namespace, rec.Group, &rec.Key)
	if err != nil {
		r.kept.Log.Warn("another host's piece is of a namespace that cannot be read; it is found at the next start",
			"key", rec.Key, "error", err)
		r.overlook(rec.Bytes)
		return true
	}
	h := pieceformat.Header{
		Namespace: rec.Namespace, Group: rec.Group, Rank: rec.Rank, Key: rec.Key, Parent: rec.Parent, Depth: rec.Depth,
		Tenant: rec.Tenant,
		Pieces: rec.Pieces, StoreTime: rec.StoreTime, DataOffset: pieceformat.Page,
		Payload: max(pieceformat.Page, rec.Bytes-pieceformat.Page),
	}
	return r.see(cl, &h, cl.NameOf(rec.Names, &rec.Key, rec.Rank), rec.Bytes) != awaited
}

// booked is how the bytes of a piece came into the account.
type booked uint8

const (
	served   booked = iota // as an entry's, or as those of a file that is not served
	withheld               // beside an entry that is in the journal, until that is decided
	awaited                // beside an entry of which this host writes or removes some: the caller asks again
)

// see books a piece that another host stored, or that a scan has found, given its path below the root. All is done under
// one lock: a put or a removal that came between would leave the piece out of the account, and the evictor would grant its
// room.
func (r backend) see(cl *catalog.Class, h *pieceformat.Header, rel string, allocated int64) booked {
	tenant := r.kept.Catalog.Tenants.Number(h.Tenant)
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	at, fp := met{id, rel}, kv.Fingerprint(h.Namespace, h.Group, h.Key)
	r.set.Lock()
	defer r.set.Unlock()
	d, slot := r.pending[id], r.set.Index.Find(fp, cl.Base, &h.Key)
	if d == nil && slot != index.None && r.set.Busy(slot) &&
		(r.set.Index.At(slot).Is(index.Evicting) || r.set.Index.Pieces(slot)&h.Pieces == 0) {
		// A put will find the piece, or come to nothing.
		if r.awaited[at] == 0 {
			r.awaited[at] = allocated
			r.set.Account.Add(capacity.Orphans, allocated)
		}
		return awaited
	}
	r.set.Account.Remove(capacity.Orphans, r.awaited[at])
	delete(r.awaited, at)
	if d != nil {
		if !d.learned[rel] && !d.has(rel) {
			d.orphaned += allocated
			r.set.Account.Add(capacity.Orphans, allocated)
		}
		d.learn(rel) // also one that the entry has: a host that knows of its removal already may have stored it again
		return withheld
	}
	late := r.scans.newLateScan()
	sight := r.firstScan
	if sight == nil {
		sight = late
	}
	name := rel
	if rel == cl.Builtin(&h.Key, h.Rank) {
		name = ""
	}
	if twice := sight.AddOf(tenant, cl, h, name, allocated); twice.Other != "" {
		// Two hosts have stored it under two names at the same time. All learn of both, and both go with the entry.
		r.set.AddFile(twice, h.Rank, rel, allocated)
		return served
	}
	r.bookOverlooked(late.Orphaned())
	if slot = r.set.Index.Find(fp, cl.Base, &h.Key); sight == late && slot != index.None &&
		!r.set.Index.At(slot).Is(index.Announced) {
		r.set.Index.Touch(slot)
		r.set.Evictor.Announce(abi.OpResident, slot, fp, 0)
	}
	return served
}

// Touched implements [shared.Backend].
func (r backend) Touched(prints []uint64) {
	r.set.Lock()
	defer r.set.Unlock()
	for _, fp := range prints {
		if slot := r.set.Index.FindFingerprint(fp); slot != index.None {
			if e := r.set.Index.At(slot); e.Is(index.Announced) && !e.Is(index.Evicting) {
				r.set.Index.Touch(slot)
				r.set.Evictor.Tell(abi.OpTouch, slot, fp, 0)
			}
		}
	}
}

// Used implements [shared.Backend].
func (r backend) Used() int64 {
	r.set.Lock()
	defer r.set.Unlock()
	others := max(0, r.root.cfg.Capacity-r.set.Account.Figures().Limit) // what is to be left free, and is not
	return r.set.Account.Figures().Used - r.inFlight + others
}

// Paths implements [shared.Backend].
func (r backend) Paths(v *shared.Victim) ([]string, error) {
	cl, err := r.classOf(v.Namespace, v.Group, &v.Key)
	if err != nil {
		return nil, fmt.Errorf("store: a victim has no name: %w", err)
	}
	var paths []string
	for _, rel := range filesOf(cl, &v.Key, v.Pieces, v.Names) {
		paths = append(paths, r.kept.Slash+rel)
	}
	return paths, nil
}

// filesOf are the paths below the root of an entry's files.
func filesOf(cl *catalog.Class, key *kv.Key, pieces uint64, named []pieceformat.Name) (list []string) {
	for rank := range entries.Ranks(pieces) {
		before := len(list)
		for _, n := range named {
			if n.Rank == rank {
				list = append(list, n.Path)
			}
		}
		if len(list) == before {
			list = append(list, cl.Builtin(key, rank))
		}
	}
	return list
}

// Identify implements [shared.Backend].
func (r backend) Identify(temp string, info staging.Info) (shared.Record, error) {
	h, _, err := r.kept.Look(temp)
	if pieceformat.IsDamage(err) {
		return shared.Record{}, fmt.Errorf("%w: %w", shared.ErrDamaged, err)
	} else if err != nil {
		return shared.Record{}, err
	}
	return shared.Record{
		Namespace: h.Namespace, Group: h.Group, Rank: h.Rank, Key: h.Key, Parent: h.Parent, Depth: h.Depth, Tenant: h.Tenant,
		Pieces: h.Pieces, Bytes: pieceformat.Padded(info.Allocated), StoreTime: h.StoreTime, Names: namesOf(h.Rank, h.Name),
	}, nil
}

// namesOf is the list of a piece's name, which is empty for the built-in one.
func namesOf(rank uint32, name string) []pieceformat.Name {
	if name == "" {
		return nil
	}
	return []pieceformat.Name{{Rank: rank, Path: name}}
}

// overlook books a file that is not served. It takes the lock.
func (r *sharedRoot) overlook(bytes int64) {
	r.set.Lock()
	defer r.set.Unlock()
	r.bookOverlooked(bytes)
}

func (r *sharedRoot) bookOverlooked(bytes int64) {
	r.set.Account.Add(capacity.Orphans, bytes)
	r.overlooked += bytes
}
