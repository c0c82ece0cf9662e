package store

import (
	"errors"
	"io/fs"
	"maps"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
)

// Propose implements [shared.Backend].
func (r backend) Propose(v *shared.Victim) bool {
	cl, err := r.classOf(v.Namespace, v.Group, &v.Key)
	r.set.Lock()
	defer r.set.Unlock()
	d := r.pending[v.ID()]
	if d == nil {
		d = &pendingEviction{}
	}
	if err == nil && !d.entry {
		fp := kv.Fingerprint(v.Namespace, v.Group, v.Key)
		if slot := r.set.Index.Find(fp, cl.Base, &v.Key); slot != index.None && !r.set.Index.At(slot).Is(index.Evicting) {
			if r.set.Busy(slot) || r.set.Index.At(slot).Pins() > 0 {
				if !d.batch && d.orphaned == 0 { // reported by this host's put: Decide does not follow a veto
					delete(r.pending, v.ID())
				}
				return false
			}
			d.Eviction, d.entry = r.set.BeginEvict(slot), true
		}
	}
	d.batch = true
	r.pending[v.ID()] = d
	return true
}

// Decide implements [shared.Backend].
func (r backend) Decide(v *shared.Victim, removed bool) {
	r.set.Lock()
	d := r.pending[v.ID()]
	if d == nil {
		r.set.Unlock()
		return
	}
	cl, err := d.Class, error(nil)
	if !d.entry {
		r.set.Unlock()
		cl, err = r.classOf(v.Namespace, v.Group, &v.Key)
		r.set.Lock()
	}
	delete(r.pending, v.ID())
	if err != nil {
		r.overlooked += d.orphaned // what is there stays in the account until the next scan
		r.set.WakeJoiners()
		r.set.Unlock()
		r.kept.Log.Error("what became of a victim cannot be seen", "key", v.Key, "error", err)
		return
	}
	rest := d.rest(filesOf(cl, &v.Key, v.Pieces, v.Names), removed)
	r.set.Account.Remove(capacity.Orphans, d.orphaned)
	if d.entry {
		if removed {
			r.set.Count.Evictions++
		}
		r.set.FinishEvict(&d.Eviction)
	}
	r.set.WakeJoiners()
	r.set.Unlock()
	for _, rel := range rest { // it may be granted, if it is there
		r.look(rel, cl.FileBytes())
	}
}

// rest is what may be left of a victim that is decided, and must be looked for: the files of one that was spared, those
// that were published again, and those that whoever named the victim did not know of.
func (d *pendingEviction) rest(victim []string, removed bool) (rest []string) {
	for _, rel := range d.files() {
		if !removed || !slices.Contains(victim, rel) {
			rest = append(rest, rel)
		}
	}
	if !removed {
		rest = append(rest, victim...)
	}
	rest = slices.AppendSeq(rest, maps.Keys(d.learned))
	slices.Sort(rest)
	return slices.Compact(rest)
}

// look enters the piece that has a name, if there is one, or books what stands there.
func (r backend) look(rel string, most int64) {
	name := r.kept.Slash + rel
	h, info, err := r.kept.Look(name)
	var cl *catalog.Class
	if err == nil {
		most = pieceformat.Padded(info.Allocated)
		cl, err = r.classOf(h.Namespace, h.Group, &h.Key)
	} else if pieceformat.IsDamage(err) {
		most = pieceformat.Padded(info.Allocated)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		r.kept.Log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
		r.overlook(most)
	case r.see(cl, &h, rel, most) == awaited:
		r.meet(sight{rel, cl, h, most})
	}
}

// forgetStep is how many slots Fenced looks at under one lock.
const forgetStep = 1 << 12

// Fenced implements [shared.Backend]. Files are left alone: what is there the next scan finds.
func (r backend) Fenced() {
	r.set.Lock()
	for _, d := range r.pending {
		r.set.Account.Remove(capacity.Orphans, d.orphaned)
		if d.entry {
			r.set.FinishEvict(&d.Eviction)
		}
	}
	clear(r.pending)
	for _, bytes := range r.awaited {
		r.set.Account.Remove(capacity.Orphans, bytes)
	}
	clear(r.awaited)
	r.met = nil
	high := r.set.Index.High()
	r.set.Unlock()
	// Nothing is granted and no put can begin, so entries do not appear where this has been.
	for from := uint32(0); from < high; from += forgetStep {
		r.set.Lock()
		for slot := from; slot < min(from+forgetStep, high); slot++ {
			if r.set.Index.At(slot).Is(index.Live) {
				entries.Forget(r.set, slot)
			}
		}
		r.set.Unlock()
	}
}

// Victims implements [shared.Backend].
func (r backend) Victims(bytes int64) (list []shared.Victim) {
	r.set.Lock()
	defer r.set.Unlock()
	if r.set.Scanning() {
		return nil // nobody knows yet what is oldest
	}
	var slots [evictor.MaxVictims]uint32
	ask := abi.Ask{Bytes: uint64(bytes), MaxVictims: evictor.MaxVictims, Tenant: abi.None}
	if list = r.accept(slots[:r.set.Evictor.Ask(ask, slots[:])], bytes); len(list) == 0 {
		list = r.accept(slots[:r.set.Evictor.Instead(ask, slots[:])], bytes)
	}
	return list
}

// accept lists those named who can go, until so many bytes are freed.
func (r backend) accept(named []uint32, bytes int64) (list []shared.Victim) {
	for _, slot := range named {
		if bytes <= 0 {
			break
		}
		if r.set.Busy(slot) || !r.set.Evictor.Evictable(slot) {
			r.set.Evictor.BadVictim()
			continue
		}
		cl := r.set.ClassOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.set.Index.Key(slot), Pieces: r.set.Index.Pieces(slot),
			Names: r.set.Index.NamesOf(slot), Bytes: r.set.Index.Bytes(slot),
		})
		bytes -= r.set.Index.Bytes(slot)
	}
	return list
}
