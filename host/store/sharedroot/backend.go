package sharedroot

import (
	"errors"
	"fmt"

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
	if r.awaits(cl, rec) {
		return false
	}
	if !r.withholds(rec) {
		h := pieceformat.Header{
			Namespace: rec.Namespace, Group: rec.Group, Rank: rec.Rank, Key: rec.Key, Parent: rec.Parent, Depth: rec.Depth,
			Tenant: rec.Tenant,
			Pieces: rec.Pieces, StoreTime: rec.StoreTime, DataOffset: pieceformat.Page,
			Payload: max(pieceformat.Page, rec.Bytes-pieceformat.Page),
		}
		r.see(cl, &h, rec.Bytes, rec.FallbackName)
	}
	return true
}

// withholds says whether a piece is of an entry that is in the journal. Until that is decided the piece's bytes are
// booked beside the entry's.
func (r backend) withholds(rec *shared.Record) bool {
	r.set.Lock()
	defer r.set.Unlock()
	d := r.pending[rec.ID()]
	if d != nil && d.learned&(1<<rec.Rank) == 0 && !(d.entry && d.Pieces&(1<<rec.Rank) != 0) {
		d.learned |= 1 << rec.Rank
		d.orphaned += rec.Bytes
		r.set.Account.Add(capacity.Orphans, rec.Bytes)
	}
	return d != nil
}

// awaits says whether a piece was published while this host writes or removes some of its entry. Its own put will find
// the piece, or come to nothing: until then the piece's bytes are booked beside the entry's.
func (r backend) awaits(cl *catalog.Class, rec *shared.Record) bool {
	r.set.Lock()
	defer r.set.Unlock()
	at := piece{rec.ID(), rec.Rank}
	slot := r.set.Index.Find(chunk.Fingerprint(rec.Namespace, rec.Group, rec.Key), cl.Base, &rec.Key)
	if slot == index.None || r.pending[at.ID] != nil || !r.set.Busy(slot) || r.set.Index.Pieces(slot)&(1<<rec.Rank) != 0 {
		r.set.Account.Remove(capacity.Orphans, r.awaited[at])
		delete(r.awaited, at)
		return false
	}
	if r.awaited[at] == 0 {
		r.awaited[at] = rec.Bytes
		r.set.Account.Add(capacity.Orphans, rec.Bytes)
	}
	return true
}

// see enters a piece that another host stored, or that a scan has found.
func (r backend) see(cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool) {
	r.set.Lock()
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	if slot := r.set.Index.Find(fp, cl.Base, &h.Key); r.pending[id] != nil || slot != index.None &&
		r.set.Index.At(slot).Is(index.Evicting) {
		r.set.Unlock()
		return
	}
	sight := r.firstScan
	r.set.Unlock()
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	late := r.scans.NewLateScan()
	if sight == nil {
		sight = late
	}
	if was := sight.Add(cl, h, allocated, fallback); was.Class != nil && !was.Twice {
		r.kept.Log.Warn("pieces of one entry have names of different place policies; all hosts must have the same",
			"key", h.Key)
		r.overlook(allocated)
		return
	}
	if sight != late {
		return
	}
	r.overlook(late.Orphaned())
	r.set.Lock()
	defer r.set.Unlock()
	if slot := r.set.Index.Find(fp, cl.Base, &h.Key); slot != index.None {
		if e := r.set.Index.At(slot); !e.Any(index.Evicting | index.Announced) {
			r.set.Index.Touch(slot)
			r.set.Evictor.Announce(abi.OpResident, slot, fp, 0)
		}
	}
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
func (r backend) Paths(v *shared.Victim) (names []string, err error) {
	cl, err := r.classOf(v.Namespace, v.Group, &v.Key)
	r.set.Lock()
	if d := r.pending[v.ID()]; d != nil && d.entry {
		cl, err = d.Class, nil
	}
	r.set.Unlock()
	if err != nil {
		return nil, fmt.Errorf("store: a victim has no name: %w", err)
	}
	for rank := range entries.Ranks(v.Pieces) {
		name, err := r.kept.Locate(cl, &v.Key, rank, v.FallbackName)
		if err != nil {
			return nil, fmt.Errorf("store: a victim has no name: %w", err)
		}
		names = append(names, name)
	}
	return names, nil
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

// overlook books a file that is not served.
func (r *Root) overlook(bytes int64) {
	r.set.Lock()
	defer r.set.Unlock()
	r.set.Account.Add(capacity.Orphans, bytes)
	r.overlooked += bytes
}
