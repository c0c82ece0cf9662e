package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// What follows is what the member asks; see [shared.Backend].

// sharedBackend is what a root's member asks of this host; see [shared.Backend].
type sharedBackend struct{ *sharedRoot }

func (c sharedBackend) classOf(ns chunk.Digest, group uint32, key *chunk.Key) (*catalog.Class, error) {
	h := pieceformat.Header{Namespace: ns, Group: group, Key: *key}
	cl, err := c.root.store.catalog.ClassFor(&h)
	if errors.Is(err, ErrUnknownNamespace) {
		if err = c.root.loadNamespaces(); err == nil { // an engine of another host's has opened it
			cl, err = c.root.store.catalog.ClassFor(&h)
		}
	}
	return cl, err
}

// Learn implements [shared.Backend].
func (c sharedBackend) Learn(rec *shared.Record) {
	r := c.root
	cl, err := c.classOf(rec.Namespace, rec.Group, &rec.Key)
	if err != nil {
		r.Log.Warn("another host's piece is of a namespace that cannot be read; it is found at the next start", "key", rec.Key, "error", err)
		c.overlook(rec.Bytes)
		return
	}
	r.Lock()
	d := c.pending[rec.ID()]
	if d != nil && d.learned&(1<<rec.Rank) == 0 && !(d.entry && d.Pieces&(1<<rec.Rank) != 0) {
		d.learned |= 1 << rec.Rank
		d.orphaned += rec.Bytes
		r.Account.Add(capacity.Orphans, rec.Bytes)
	}
	r.Unlock()
	if d == nil {
		h := pieceformat.Header{
			Namespace: rec.Namespace, Group: rec.Group, Rank: rec.Rank, Key: rec.Key, Parent: rec.Parent, Depth: rec.Depth, Tenant: rec.Tenant,
			Pieces: rec.Pieces, StoreTime: rec.StoreTime, DataOffset: pieceformat.Page, Payload: max(pieceformat.Page, rec.Bytes-pieceformat.Page),
		}
		c.see(cl, &h, rec.Bytes, rec.FallbackName)
	}
}

// see enters a piece that another host stored, or that a scan has found.
func (c sharedBackend) see(cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool) {
	r := c.root
	r.Lock()
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	if slot := r.Index.Find(fp, cl.Base, &h.Key); c.pending[id] != nil || slot != index.None && r.Index.At(slot).Is(index.Evicting) {
		r.Unlock()
		return
	}
	sight := c.firstScan
	r.Unlock()
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	late := r.recovery.NewLateScan()
	if sight == nil {
		sight = late
	}
	if was := sight.Add(cl, h, allocated, fallback); was.Class != nil && !was.Twice {
		r.Log.Warn("pieces of one entry have names of different place policies; all hosts must have the same", "key", h.Key)
		c.overlook(allocated)
		return
	}
	if sight != late {
		return
	}
	c.overlook(late.Orphaned())
	r.Lock()
	defer r.Unlock()
	if slot := r.Index.Find(fp, cl.Base, &h.Key); slot != index.None {
		if e := r.Index.At(slot); !e.Any(index.Evicting | index.Announced) {
			r.Index.Touch(slot)
			r.Evictor.Announce(abi.OpResident, slot, fp, 0)
		}
	}
}

// Touched implements [shared.Backend].
func (c sharedBackend) Touched(prints []uint64) {
	r := c.root
	r.Lock()
	defer r.Unlock()
	for _, fp := range prints {
		if slot := r.Index.FindFingerprint(fp); slot != index.None {
			if e := r.Index.At(slot); e.Is(index.Announced) && !e.Is(index.Evicting) {
				r.Index.Touch(slot)
				r.Evictor.Tell(abi.OpTouch, slot, fp, 0)
			}
		}
	}
}

// Propose implements [shared.Backend].
func (c sharedBackend) Propose(v *shared.Victim) bool {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.Lock()
	defer r.Unlock()
	d := c.pending[v.ID()]
	if d == nil {
		d = &pendingEviction{}
	}
	if err == nil && !d.entry {
		fp := chunk.Fingerprint(v.Namespace, v.Group, v.Key)
		if slot := r.Index.Find(fp, cl.Base, &v.Key); slot != index.None && !r.Index.At(slot).Is(index.Evicting) {
			if r.Busy(slot) || r.Index.At(slot).Pins() > 0 {
				return false
			}
			d.Eviction, d.entry = r.BeginEvict(slot), true
		}
	}
	d.batch = true
	c.pending[v.ID()] = d
	return true
}

// Decide implements [shared.Backend].
func (c sharedBackend) Decide(v *shared.Victim, removed bool) {
	r := c.root
	r.Lock()
	d := c.pending[v.ID()]
	if d == nil {
		r.Unlock()
		return
	}
	var names []string
	var err error
	if !removed || d.learned != 0 {
		r.Unlock()
		names, err = c.Paths(v) // of the pending eviction's class
		r.Lock()
	}
	delete(c.pending, v.ID())
	if err != nil {
		c.keep(d, removed)
		r.Unlock()
		r.Log.Error("what became of a victim cannot be seen", "key", v.Key, "error", err)
		return
	}
	r.Account.Remove(capacity.Orphans, d.orphaned)
	if d.entry {
		d.Left = 0
		if removed {
			r.Count.Evictions++
		}
		r.FinishEvict(&d.Eviction)
	}
	r.WakeJoiners()
	r.Unlock()
	for _, name := range names { // spared, or stored again since; it may be granted, if it is there
		h, info, err := r.Look(name)
		if err != nil {
			continue
		}
		if cl, err := c.classOf(h.Namespace, h.Group, &h.Key); err == nil {
			c.see(cl, &h, pieceformat.Padded(info.Allocated), v.FallbackName)
		}
	}
}

// keep ends a pending eviction whose files cannot be looked at: an entry that was spared is what it was, and what else
// was learned stays in the account until the next scan. mu is held.
func (c sharedBackend) keep(d *pendingEviction, removed bool) {
	r := c.root
	c.overlooked += d.orphaned
	switch {
	case !d.entry:
	case removed:
		d.Left = 0
		r.Count.Evictions++
		r.FinishEvict(&d.Eviction)
	default:
		r.CancelEvict(&d.Eviction)
	}
	r.WakeJoiners()
}

// Fenced implements [shared.Backend]. Entries that went meanwhile are found gone by who opens them. What this host
// wanted to be removed the others may not have heard; the scan will find it.
func (c sharedBackend) Fenced() {
	r := c.root
	r.Lock()
	defer r.Unlock()
	for id, d := range c.pending {
		if !d.batch {
			delete(c.pending, id)
			r.Account.Remove(capacity.Orphans, d.orphaned)
		}
	}
}

// Victims implements [shared.Backend].
func (c sharedBackend) Victims(bytes int64) (list []shared.Victim) {
	r := c.root
	r.Lock()
	defer r.Unlock()
	if r.Scanning() {
		return nil // nobody knows yet what is oldest
	}
	var slots [evictor.MaxVictims]uint32
	n := r.Evictor.Ask(abi.Ask{Bytes: uint64(bytes), MaxVictims: evictor.MaxVictims, Tenant: abi.None}, slots[:])
	for _, slot := range slots[:n] {
		if bytes <= 0 {
			break
		}
		if r.Busy(slot) || !r.Evictor.Evictable(slot) {
			r.Evictor.BadVictim()
			continue
		}
		e := r.Index.At(slot)
		cl := r.ClassOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.Index.Key(slot), Pieces: r.Index.Pieces(slot), FallbackName: e.Is(index.FallbackName), Bytes: r.Index.Bytes(slot),
		})
		bytes -= r.Index.Bytes(slot)
	}
	return list
}

// Used implements [shared.Backend].
func (c sharedBackend) Used() int64 {
	c.root.Lock()
	defer c.root.Unlock()
	others := max(0, c.root.cfg.Capacity-c.root.Account.Limit()) // what is to be left free, and is not
	return c.root.Account.Used() - c.inFlight + others
}

// Paths implements [shared.Backend].
func (c sharedBackend) Paths(v *shared.Victim) (names []string, err error) {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.Lock()
	if d := c.pending[v.ID()]; d != nil && d.entry {
		cl, err = d.Class, nil
	}
	r.Unlock()
	if err != nil {
		return nil, fmt.Errorf("store: a victim has no name: %w", err)
	}
	for rank := range ranksOf(v.Pieces) {
		name, err := r.Locate(cl, &v.Key, rank, v.FallbackName)
		if err != nil {
			return nil, fmt.Errorf("store: a victim has no name: %w", err)
		}
		names = append(names, name)
	}
	return names, nil
}

// Identify implements [shared.Backend].
func (c sharedBackend) Identify(temp string, info staging.Info) (shared.Record, error) {
	h, _, err := c.root.Look(temp)
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
func (c *sharedRoot) overlook(bytes int64) {
	c.root.Lock()
	defer c.root.Unlock()
	c.root.Account.Add(capacity.Orphans, bytes)
	c.overlooked += bytes
}

// SharedStats is a root's part among the hosts that share it.
type SharedStats = shared.Stats

func (c *sharedRoot) stats() *SharedStats {
	if c.member == nil {
		return nil
	}
	s := c.member.Stats()
	return &s
}

// sharedJudge is the [recovery.Judge] of a shared root: what is of no use to this host is left alone.
type sharedJudge struct{ *sharedRoot }

// Found enters a piece that a scan has met. It may have gone since its header was read.
func (c sharedJudge) Found(_ *recovery.Scan, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool) {
	r := c.root
	sharedBackend(c).see(cl, h, allocated, fallback)
	if _, err := r.FS.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	r.Lock()
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	slot := r.Index.Find(fp, cl.Base, &h.Key)
	r.Unlock()
	if slot != index.None {
		r.drop(entries.Mark{Slot: slot, Fingerprint: fp}, 0)
	}
}

func (c sharedJudge) Unsound(_ *recovery.Scan, name, _ string, info staging.Info, err error) {
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	c.root.Log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
	c.overlook(pieceformat.Padded(info.Allocated))
}

// Unknown leaves a piece alone: another host may know whose it is.
func (c sharedJudge) Unknown(_ *recovery.Scan, _ string, allocated int64, _ error) {
	c.root.recovery.Count.Unclaimed.Add(1)
	c.overlook(allocated)
}

func (c sharedJudge) Rename(_ *recovery.Scan, from, _ string, allocated int64) bool {
	c.root.Log.Warn("piece of a shared root left alone: this host's place policy gives it another name; all hosts must have the same policy", "file", from)
	c.overlook(allocated)
	return false
}
