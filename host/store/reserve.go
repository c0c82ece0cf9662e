package store

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// maxAsked bounds the victims of one ask.
const maxAsked = 256

// evicted is what came of an ask for victims.
type evicted struct {
	entries int
	freed   int64 // bytes; an entry whose files would not go frees none
	failed  error // why some file would not go
}

// evictSome takes victims, asks for them if need be, and unlinks those that are valid, up to the bytes wanted. It is called
// with turn and mu held, and lets go of mu meanwhile. heir may get one of the files instead. Only entries of the tenant go,
// if one is named.
func (r *root) evictSome(bytes int64, tenant uint32, heir *Put) (got evicted) {
	gone := r.leaving[:0]
	if tenant == abi.None && r.evict.Ahead() > 0 {
		gone = r.leaveAhead(bytes, gone)
	} else {
		gone = r.leaveAsked(bytes, tenant, gone)
	}
	r.leaving = gone
	if len(gone) == 0 {
		return got
	}
	r.callVictims(gone)
	r.mu.Unlock()
	for i := range gone {
		d := &gone[i]
		r.callRest(gone[i:])
		var err error
		if d.stray, err = r.unlink(d, r.bequeath(d, heir)); err != nil && got.failed == nil {
			got.failed = err
		}
	}
	r.mu.Lock()
	got.entries = len(gone)
	for i := range gone {
		got.freed += max(0, r.x.Bytes(gone[i].slot)-gone[i].stray)
		r.expelled(&gone[i])
	}
	return got
}

// leaveAsked starts the end of the victims that the policy names now.
func (r *root) leaveAsked(bytes int64, tenant uint32, gone []departure) []departure {
	ask := abi.Ask{Bytes: uint64(bytes), MaxVictims: maxAsked, Tenant: tenant}
	n := r.ask(ask, r.victims[:])
	for _, slot := range r.victims[:n] {
		if bytes <= 0 {
			break
		}
		if !r.fits(slot, tenant) {
			r.count.badVictims++
			continue
		}
		bytes -= r.x.Bytes(slot)
		gone = append(gone, r.leave(slot))
		r.count.evictions++
	}
	return gone
}

// leaveAhead starts the end of victims that the policy has named before, and asks it once when they do not suffice.
func (r *root) leaveAhead(bytes int64, gone []departure) []departure {
	for asked := false; ; asked = true {
		for list := r.standing(); len(list) > 0 && bytes > 0; list = r.standing() {
			slot := list[0]
			r.foretold.slots = list[1:]
			if r.mayStillGo(slot) {
				bytes -= r.x.Bytes(slot)
				gone = append(gone, r.leave(slot))
				r.count.evictions++
			}
		}
		if bytes <= 0 || asked {
			return gone
		}
		r.foretell(bytes)
	}
}

// evictable judges a victim against the index as it is now.
func (r *root) evictable(slot uint32) bool {
	if slot >= r.x.High() {
		return false
	}
	e := r.x.At(slot)
	return e.Is(index.Live) && !e.Any(index.Evicting|index.Detached) && e.Pins() == 0
}

// departure is an entry on its way out, with what its files' names are made of.
type departure struct {
	slot   uint32
	class  *class
	key    chunk.Key
	pieces uint64
	detour bool
	stray  int64   // bytes whose files are still there
	called *called // has names, while turn is held; or nil
}

func ranksOf(pieces uint64) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for ; pieces != 0; pieces &= pieces - 1 {
			if !yield(uint32(bits.TrailingZeros64(pieces))) {
				return
			}
		}
	}
}

// locate is the path of one of its pieces.
func (r *root) locate(d *departure, rank uint32) (string, error) {
	if d.called != nil {
		if p := d.called.of(d.class, &d.key, rank); p != nil {
			return r.locateAt(p.name, d.class, &d.key, rank, d.detour)
		}
	}
	return r.locatePiece(d.class, &d.key, rank, d.detour)
}

// leave starts an entry's end: the policy hears of it and lookups miss. expelled ends it, after its files are unlinked.
func (r *root) leave(slot uint32) departure {
	e := r.x.At(slot)
	d := departure{
		slot: slot, class: r.classOf(slot), key: r.x.Key(slot), pieces: r.x.Pieces(slot), detour: e.Is(index.FallbackName),
	}
	told := e.Is(index.Announced)
	e.Set(index.Evicting)
	e.Unset(index.Announced)
	if e.Is(index.Complete) {
		r.complete--
	}
	if r.scanning {
		r.forgone[r.x.Fingerprint(slot)] = struct{}{}
	}
	f := r.flights[slot]
	f.expelling = true
	r.flights[slot] = f
	if !told {
		return d // a scan has found it, and the policy has not been told yet
	}
	r.event(abi.OpRemove, slot, r.x.Fingerprint(slot), index.None, 0)
	return d
}

// stay takes leave back, when no file of the entry has gone. mu is held.
func (r *root) stay(d *departure) {
	e := r.x.At(d.slot)
	e.Unset(index.Evicting)
	if e.Is(index.Complete) {
		r.complete++
	}
	f := r.flights[d.slot]
	f.expelling = false
	r.setFlight(d.slot, f)
	r.announce(abi.OpResident, d.slot, r.x.Fingerprint(d.slot), 0)
}

// unlink removes the files of an entry's pieces and returns the bytes of those that would not go, and why. mu is not held.
func (r *root) unlink(d *departure, pieces uint64) (stray int64, failed error) {
	if r.fellows != nil {
		return r.fellows.disown(d, pieces), nil
	}
	for rank := range ranksOf(pieces) {
		name, err := r.locate(d, rank)
		if err != nil {
			r.log.Error("a piece has no name; its bytes stay accounted until it has one", "key", d.key, "error", err)
			r.deferDeleteUnnamed(d.class, &d.key, rank, d.detour)
			stray, failed = stray+d.class.fileBytes(), err
			continue
		}
		left, err := r.remove(name, d.class.fileBytes())
		stray += left
		if errors.Is(err, fs.ErrNotExist) {
			r.counted(&r.count.vanished)
			r.recount()
		} else if err != nil {
			failed = err
		}
	}
	return stray, failed
}

// remove unlinks a file. When the file would not go, it says why and how many bytes are still taken: most, when nobody can
// tell. It is tried again then; the bytes are the caller's to book as strays. The error is [fs.ErrNotExist] when the file was
// gone already. An unlink can report an error although it happened, so the name is looked at again.
func (r *root) remove(name string, most int64) (left int64, err error) {
	if err = r.fs.Remove(name); err == nil || errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	info, serr := r.fs.Stat(name)
	if errors.Is(serr, fs.ErrNotExist) {
		return 0, nil
	}
	if left = most; serr == nil {
		left = pieceformat.Padded(info.Allocated)
	}
	r.log.Error("a file could not be unlinked; its bytes stay accounted until it goes", "file", name, "error", err)
	r.deferDelete(&orphan{name: name, bytes: left})
	return left, err
}

// locatePiece is the path of a published piece. Only an entry with a detour can have one under the built-in name, and
// what stands under the other name may then be somebody else's: the header tells.
func (r *root) locatePiece(c *class, k *chunk.Key, rank uint32, detour bool) (string, error) {
	name, err := r.path(c, k, rank, false)
	switch {
	case err == nil:
		return r.locateAt(name, c, k, rank, detour)
	case detour:
		return r.path(c, k, rank, true)
	}
	return "", err
}

// locateAt is locatePiece for who has the policy's name.
func (r *root) locateAt(name string, c *class, k *chunk.Key, rank uint32, detour bool) (string, error) {
	if !detour {
		return name, nil
	}
	h, herr := r.readHeader(name)
	if herr == nil && c.isPiece(&h, k, rank) {
		return name, nil
	}
	builtin, err := r.path(c, k, rank, true)
	if err != nil || herr == nil || errors.Is(herr, fs.ErrNotExist) {
		return builtin, err
	}
	if pieceformat.IsDamage(herr) {
		if _, herr = r.fs.Stat(builtin); herr == nil {
			return builtin, nil
		} else if errors.Is(herr, fs.ErrNotExist) {
			return name, nil // it was this piece, or what is there is of no use to anybody
		}
	}
	return "", fmt.Errorf("store: under which of two names rank %d of %s stands cannot be seen: %w", rank, k, herr)
}

// expelled is called once an entry's files are unlinked.
func (r *root) expelled(d *departure) {
	n := min(d.stray, r.x.Bytes(d.slot))
	r.x.Resize(d.slot, -n)
	r.stray += n
	r.bill(d.slot, -n)
	f := r.flights[d.slot]
	f.expelling = false
	r.setFlight(d.slot, f)
	r.settle(d.slot)
}

func (r *root) setFlight(slot uint32, f flight) {
	if f == (flight{}) {
		delete(r.flights, slot)
		return
	}
	r.flights[slot] = f
}

// settle ends a leaving entry as far as it can be: out of the table when nothing happens to its files any more, and its
// bytes and slot free when nobody has a pin on it (unlinked files take space while they are open).
func (r *root) settle(slot uint32) {
	e := r.x.At(slot)
	if !e.Is(index.Evicting) {
		return
	}
	if !e.Is(index.Detached) {
		if _, busy := r.flights[slot]; busy {
			return
		}
		r.x.Detach(slot)
		r.settled.Broadcast()
	}
	if e.Pins() == 0 {
		r.used -= r.x.Bytes(slot)
		r.bill(slot, -r.x.Bytes(slot))
		r.classOf(slot).drop()
		r.x.Release(slot)
		r.settled.Broadcast()
	}
}

// drop removes an entry that is not, or no longer, what the index says, at once. mu is not held. keep names ranks whose
// files are somebody else's care.
func (r *root) drop(m mark, keep uint64) {
	r.mu.Lock()
	if !r.stands(m) {
		r.mu.Unlock()
		return
	}
	d := r.leave(m.slot)
	r.mu.Unlock()
	d.stray, _ = r.unlink(&d, d.pieces&^keep)
	r.mu.Lock()
	r.expelled(&d)
	r.mu.Unlock()
}

// stands says whether a mark still names a live entry.
func (r *root) stands(m mark) bool {
	if m.slot >= r.x.High() {
		return false
	}
	e := r.x.At(m.slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && r.x.Fingerprint(m.slot) == m.print
}
