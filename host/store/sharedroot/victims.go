package sharedroot

import (
	"errors"
	"io/fs"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
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
		fp := chunk.Fingerprint(v.Namespace, v.Group, v.Key)
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
	rest := d.rest(v, removed)
	cl, names, err := r.locateUnlocking(&rest)
	for now := d.rest(v, removed); now != rest; now = d.rest(v, removed) { // a scan has met another
		rest = now
		cl, names, err = r.locateUnlocking(&rest)
	}
	delete(r.pending, v.ID())
	if err != nil {
		r.keep(d, v, removed)
		r.set.Unlock()
		r.kept.Log.Error("what became of a victim cannot be seen", "key", v.Key, "error", err)
		return
	}
	r.set.Account.Remove(capacity.Orphans, d.orphaned)
	if d.entry {
		if removed {
			r.set.Count.Evictions++
		}
		r.set.FinishEvict(&d.Eviction)
	}
	r.set.WakeJoiners()
	r.set.Unlock()
	for _, name := range names { // it may be granted, if it is there
		r.look(name, cl.FileBytes(), rest.FallbackName)
	}
}

// rest is what may be left of a victim that is decided, and must be looked for: the pieces of one that was spared, those
// that were published again, and those that whoever named the victim did not know of.
func (d *pendingEviction) rest(v *shared.Victim, removed bool) shared.Victim {
	rest := *v
	if d.entry {
		rest.Pieces |= d.Pieces
		rest.FallbackName = rest.FallbackName || d.FallbackName
	}
	if removed {
		rest.Pieces &^= v.Pieces
	}
	rest.Pieces |= d.learned
	return rest
}

// locateUnlocking is locate while the lock is held, which is released meanwhile.
func (r backend) locateUnlocking(v *shared.Victim) (*catalog.Class, []string, error) {
	r.set.Unlock()
	defer r.set.Lock()
	return r.locate(v)
}

// look enters the piece that has a name, if there is one, or books what stands there.
func (r backend) look(name string, most int64, fallback bool) {
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
	case r.see(cl, &h, most, fallback) == awaited:
		r.meet(met{name, cl, h, most, fallback})
	}
}

// keep ends a pending eviction whose files cannot be looked at: an entry that was spared is what it was, and what else
// may be there stays in the account until the next scan. The lock is held.
func (r backend) keep(d *pendingEviction, v *shared.Victim, removed bool) {
	r.overlooked += d.orphaned
	switch {
	case !d.entry:
	case removed:
		r.bookOverlooked(int64(bits.OnesCount64(d.Pieces&(d.learned|^v.Pieces))) * d.Class.FileBytes())
		r.set.Count.Evictions++
		r.set.FinishEvict(&d.Eviction)
	default:
		r.set.CancelEvict(&d.Eviction)
	}
	r.set.WakeJoiners()
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
		e := r.set.Index.At(slot)
		cl := r.set.ClassOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.set.Index.Key(slot), Pieces: r.set.Index.Pieces(slot),
			FallbackName: e.Is(index.FallbackName), Bytes: r.set.Index.Bytes(slot),
		})
		bytes -= r.set.Index.Bytes(slot)
	}
	return list
}
