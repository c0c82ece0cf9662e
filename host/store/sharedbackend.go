package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
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
		r.log.Warn("another host's piece is of a namespace that cannot be read; it is found at the next start", "key", rec.Key, "error", err)
		c.overlook(rec.Bytes)
		return
	}
	r.mu.Lock()
	d := c.pending[rec.ID()]
	if d != nil && d.learned&(1<<rec.Rank) == 0 && !(d.entry && d.pieces&(1<<rec.Rank) != 0) {
		d.learned |= 1 << rec.Rank
		d.orphaned += rec.Bytes
		r.account.Add(capacity.Orphans, rec.Bytes)
	}
	r.mu.Unlock()
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
	r.mu.Lock()
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	if slot := r.x.Find(fp, cl.Base, &h.Key); c.pending[id] != nil || slot != index.None && r.x.At(slot).Is(index.Evicting) {
		r.mu.Unlock()
		return
	}
	sight := c.scanState
	r.mu.Unlock()
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	late := &scanState{root: r, late: true}
	if sight == nil {
		sight = late
	}
	if was := sight.addToIndex(cl, h, allocated, fallback); was.class != nil && !was.twice {
		r.log.Warn("pieces of one entry have names of different place policies; all hosts must have the same", "key", h.Key)
		c.overlook(allocated)
		return
	}
	if sight != late {
		return
	}
	c.overlook(late.orphaned)
	r.mu.Lock()
	defer r.mu.Unlock()
	if slot := r.x.Find(fp, cl.Base, &h.Key); slot != index.None {
		if e := r.x.At(slot); !e.Any(index.Evicting | index.Announced) {
			r.x.Touch(slot)
			r.evictor.Announce(abi.OpResident, slot, fp, 0)
		}
	}
}

// Touched implements [shared.Backend].
func (c sharedBackend) Touched(prints []uint64) {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, fp := range prints {
		if slot := r.x.FindFingerprint(fp); slot != index.None {
			if e := r.x.At(slot); e.Is(index.Announced) && !e.Is(index.Evicting) {
				r.x.Touch(slot)
				r.evictor.Tell(abi.OpTouch, slot, fp, 0)
			}
		}
	}
}

// Propose implements [shared.Backend].
func (c sharedBackend) Propose(v *shared.Victim) bool {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.mu.Lock()
	defer r.mu.Unlock()
	d := c.pending[v.ID()]
	if d == nil {
		d = &pendingEviction{}
	}
	if err == nil && !d.entry {
		fp := chunk.Fingerprint(v.Namespace, v.Group, v.Key)
		if slot := r.x.Find(fp, cl.Base, &v.Key); slot != index.None && !r.x.At(slot).Is(index.Evicting) {
			if _, busy := r.flights[slot]; busy || r.x.At(slot).Pins() > 0 {
				return false
			}
			d.eviction, d.entry = r.beginEvict(slot), true
		}
	}
	d.batch = true
	c.pending[v.ID()] = d
	return true
}

// Decide implements [shared.Backend].
func (c sharedBackend) Decide(v *shared.Victim, removed bool) {
	r := c.root
	r.mu.Lock()
	d := c.pending[v.ID()]
	if d == nil {
		r.mu.Unlock()
		return
	}
	var names []string
	var err error
	if !removed || d.learned != 0 {
		r.mu.Unlock()
		names, err = c.Paths(v) // of the pending eviction's class
		r.mu.Lock()
	}
	delete(c.pending, v.ID())
	if err != nil {
		c.keep(d, removed)
		r.mu.Unlock()
		r.log.Error("what became of a victim cannot be seen", "key", v.Key, "error", err)
		return
	}
	r.account.Remove(capacity.Orphans, d.orphaned)
	if d.entry {
		d.eviction.left = 0
		if removed {
			r.count.evictions++
		}
		r.finishEvict(&d.eviction)
	}
	r.reaped.Broadcast()
	r.mu.Unlock()
	for _, name := range names { // spared, or stored again since; it may be granted, if it is there
		h, info, err := r.look(name)
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
		d.eviction.left = 0
		r.count.evictions++
		r.finishEvict(&d.eviction)
	default:
		r.cancelEvict(&d.eviction)
	}
	r.reaped.Broadcast()
}

// Fenced implements [shared.Backend]. Entries that went meanwhile are found gone by who opens them. What this host
// wanted to be removed the others may not have heard; the scan will find it.
func (c sharedBackend) Fenced() {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, d := range c.pending {
		if !d.batch {
			delete(c.pending, id)
			r.account.Remove(capacity.Orphans, d.orphaned)
		}
	}
}

// Victims implements [shared.Backend].
func (c sharedBackend) Victims(bytes int64) (list []shared.Victim) {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.scanning {
		return nil // nobody knows yet what is oldest
	}
	var slots [evictor.MaxVictims]uint32
	n := r.evictor.Ask(abi.Ask{Bytes: uint64(bytes), MaxVictims: evictor.MaxVictims, Tenant: abi.None}, slots[:])
	for _, slot := range slots[:n] {
		if bytes <= 0 {
			break
		}
		if _, busy := r.flights[slot]; busy || !r.evictor.Evictable(slot) {
			r.evictor.BadVictim()
			continue
		}
		e := r.x.At(slot)
		cl := r.classOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.x.Key(slot), Pieces: r.x.Pieces(slot), FallbackName: e.Is(index.FallbackName), Bytes: r.x.Bytes(slot),
		})
		bytes -= r.x.Bytes(slot)
	}
	return list
}

// Used implements [shared.Backend].
func (c sharedBackend) Used() int64 {
	c.root.mu.Lock()
	defer c.root.mu.Unlock()
	others := max(0, c.root.cfg.Capacity-c.root.account.Limit()) // what is to be left free, and is not
	return c.root.account.Used() - c.inFlight + others
}

// Paths implements [shared.Backend].
func (c sharedBackend) Paths(v *shared.Victim) (names []string, err error) {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.mu.Lock()
	if d := c.pending[v.ID()]; d != nil && d.entry {
		cl, err = d.class, nil
	}
	r.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("store: a victim has no name: %w", err)
	}
	for rank := range ranksOf(v.Pieces) {
		name, err := r.locatePiece(cl, &v.Key, rank, v.FallbackName)
		if err != nil {
			return nil, fmt.Errorf("store: a victim has no name: %w", err)
		}
		names = append(names, name)
	}
	return names, nil
}

// Identify implements [shared.Backend].
func (c sharedBackend) Identify(temp string, info staging.Info) (shared.Record, error) {
	h, err := c.root.readHeader(temp)
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
	c.root.mu.Lock()
	defer c.root.mu.Unlock()
	c.root.account.Add(capacity.Orphans, bytes)
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

// found enters a piece that a scan has met. It may have gone since its header was read.
func (c *sharedRoot) found(_ *scanState, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool) {
	r := c.root
	sharedBackend{c}.see(cl, h, allocated, fallback)
	if _, err := r.fs.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	r.mu.Lock()
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	slot := r.x.Find(fp, cl.Base, &h.Key)
	r.mu.Unlock()
	if slot != index.None {
		r.drop(mark{slot, fp}, 0)
	}
}

func (c *sharedRoot) foundUnsound(_ *scanState, name, _ string, info staging.Info, err error) {
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	c.root.log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
	c.overlook(pieceformat.Padded(info.Allocated))
}

// foundUnknown leaves a piece alone: another host may know whose it is.
func (c *sharedRoot) foundUnknown(_ *scanState, _ string, allocated int64, _ error) {
	c.root.counted(&c.root.count.unclaimed)
	c.overlook(allocated)
}

func (c *sharedRoot) rename(_ *scanState, from, _ string, allocated int64) bool {
	c.root.log.Warn("piece of a shared root left alone: this host's place policy gives it another name; all hosts must have the same policy", "file", from)
	c.overlook(allocated)
	return false
}

// scanEnded takes over what the scan could make nothing of: it has learned of other hosts' pieces until now.
func (c *sharedRoot) scanEnded(sight *scanState, booked int64) {
	c.root.account.Add(capacity.Orphans, sight.orphaned-booked)
	c.overlooked += sight.orphaned
	c.scanState = nil
}
