package sharedroot

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// backend is what a root's member asks of this host; see [shared.Backend].
type backend struct{ *Root }

func (r backend) classOf(ns chunk.Digest, group uint32, key *chunk.Key) (*catalog.Class, error) {
	h := pieceformat.Header{Namespace: ns, Group: group, Key: *key}
	cl, err := r.kept.Catalog.ClassFor(&h)
	if errors.Is(err, catalog.ErrUnknownNamespace) {
		if err = r.kept.LoadNamespaces(); err == nil { // an engine of another host's has opened it
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
	return r.see(cl, &h, rec.Bytes, rec.FallbackName) != awaited
}

// booked is how the bytes of a piece came into the account.
type booked uint8

const (
	served   booked = iota // as an entry's, or as those of a file that is not served
	withheld               // beside an entry that is in the journal, until that is decided
	awaited                // beside an entry of which this host writes or removes some: the caller asks again
)

// see books a piece that another host stored, or that a scan has found.
func (r backend) see(cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool) booked {
	tenant := r.kept.Catalog.Tenants.Number(h.Tenant)
	how, clash := r.book(tenant, cl, h, allocated, fallback)
	if clash {
		r.kept.Log.Warn("pieces of one entry have names of different place policies; all hosts must have the same",
			"key", h.Key)
	}
	return how
}

// book does all under one lock: a put or a removal that came between would leave the piece out of the account, and the
// evictor would grant its room.
func (r backend) book(
	tenant uint16, cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool,
) (how booked, clash bool) {
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	at, fp := piece{id, h.Rank}, chunk.Fingerprint(h.Namespace, h.Group, h.Key)
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
		return awaited, false
	}
	r.set.Account.Remove(capacity.Orphans, r.awaited[at])
	delete(r.awaited, at)
	if d != nil {
		if d.learned&h.Pieces == 0 && !(d.entry && d.Pieces&h.Pieces != 0) {
			d.orphaned += allocated
			r.set.Account.Add(capacity.Orphans, allocated)
		}
		// Also one that the entry has: whoever knows already that it was removed may have stored it again.
		d.learned |= h.Pieces
		return withheld, false
	}
	late := r.scans.NewLateScan()
	sight := r.firstScan
	if sight == nil {
		sight = late
	}
	if was := sight.AddOf(tenant, cl, h, allocated, fallback); was.Class != nil && !was.Twice {
		r.bookOverlooked(allocated)
		return served, true
	}
	r.bookOverlooked(late.Orphaned())
	if slot = r.set.Index.Find(fp, cl.Base, &h.Key); sight == late && slot != index.None &&
		!r.set.Index.At(slot).Is(index.Announced) {
		r.set.Index.Touch(slot)
		r.set.Evictor.Announce(abi.OpResident, slot, fp, 0)
	}
	return served, false
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
	others := max(0, r.cfg.Capacity-r.set.Account.Limit()) // what is to be left free, and is not
	return r.set.Account.Used() - r.inFlight + others
}

// Paths implements [shared.Backend].
func (r backend) Paths(v *shared.Victim) ([]string, error) {
	_, names, err := r.locate(v)
	return names, err
}

// Missed implements [shared.Backend].
func (r backend) Missed(v *shared.Victim, k int, path string) error {
	cl, _, err := r.locate(v)
	if err != nil || v.FallbackName {
		return err
	}
	return r.kept.Missed(cl, &v.Key, slices.Collect(entries.Ranks(v.Pieces))[k], path)
}

// locate names a victim's files, and says of which class they are.
func (r backend) locate(v *shared.Victim) (cl *catalog.Class, names []string, err error) {
	cl, err = r.classOf(v.Namespace, v.Group, &v.Key)
	r.set.Lock()
	if d := r.pending[v.ID()]; d != nil && d.entry {
		cl, err = d.Class, nil
	}
	r.set.Unlock()
	for rank := range entries.Ranks(v.Pieces) {
		var name string
		if err == nil {
			name, err = r.kept.Locate(cl, &v.Key, rank, v.FallbackName)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("store: a victim has no name: %w", err)
		}
		names = append(names, name)
	}
	return cl, names, nil
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
		Pieces: h.Pieces, Bytes: pieceformat.Padded(info.Allocated), StoreTime: h.StoreTime,
	}, nil
}

// overlook books a file that is not served. It takes the lock.
func (r *Root) overlook(bytes int64) {
	r.set.Lock()
	defer r.set.Unlock()
	r.bookOverlooked(bytes)
}

func (r *Root) bookOverlooked(bytes int64) {
	r.set.Account.Add(capacity.Orphans, bytes)
	r.overlooked += bytes
}
