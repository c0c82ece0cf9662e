package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// maxAsked bounds the victims of one ask.
const maxAsked = 256

// makeRoom sees to it that need bytes, and a slot if one is wanted, are free. The caller holds mu, and has it when it
// returns, also with an error. demand says that it may evict: then the caller holds turn too, and mu is let go while
// files are unlinked. heir is the put that the room is for, if any: it may get a victim's file.
func (r *root) makeRoom(ctx context.Context, need int64, wantSlot, demand bool, heir *Put) error {
	if need > r.cfg.Capacity {
		return fmt.Errorf("%w: %d bytes in a root of %d", ErrNoSpace, need, r.cfg.Capacity)
	}
	for {
		short := r.used + need - r.cfg.Capacity
		noSlot := wantSlot && r.x.used == r.x.max
		if short <= 0 && !noSlot {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if !demand {
			r.wake()
			return fmt.Errorf("%w: %d bytes are short in %s until the evictor has run", ErrNoSpace, short, r.dir)
		}
		if r.evictSome(max(short, 1), heir) > 0 {
			continue
		}
		if r.quar.bytes > 0 {
			r.purge(short)
			continue
		}
		return fmt.Errorf("%w: %d bytes are short in %s and the evict policy names no victim", ErrNoSpace, short, r.dir)
	}
}

// evictSome asks for victims, unlinks those that are valid, up to the bytes wanted, and says how many entries went. It is
// called with turn and mu held, and lets go of mu meanwhile. heir may get one of the files instead.
func (r *root) evictSome(bytes int64, heir *Put) int {
	ask := abi.Ask{Bytes: uint64(bytes), MaxVictims: maxAsked, Tenant: abi.None}
	n, err := r.evict.Victims(ask, r.victims[:])
	if err != nil {
		r.replace(err)
		if n, err = r.evict.Victims(ask, r.victims[:]); err != nil {
			n = 0
		}
	}
	r.count.asks++
	gone := r.leaving[:0]
	for _, slot := range r.victims[:n] {
		if bytes <= 0 {
			break
		}
		if !r.evictable(slot) {
			r.count.badVictims++
			continue
		}
		bytes -= r.x.at(slot).bytes()
		gone = append(gone, r.leave(slot))
		r.count.evictions++
	}
	r.leaving = gone
	if len(gone) == 0 {
		return 0
	}
	r.mu.Unlock()
	for i := range gone {
		gone[i].stray = r.unlink(&gone[i], r.bequeath(&gone[i], heir))
	}
	r.mu.Lock()
	for i := range gone {
		r.expelled(&gone[i])
	}
	return len(gone)
}

// evictable judges a victim against the index as it is now.
func (r *root) evictable(slot uint32) bool {
	if slot >= r.x.high {
		return false
	}
	e := r.x.at(slot)
	return e.is(stLive) && !e.any(stLeaving|stDetached) && e.pins == 0
}

// departure is an entry on its way out, with what its files' names are made of.
type departure struct {
	slot   uint32
	class  *class
	key    chunk.Key
	pieces uint64
	detour bool
	stray  int64 // bytes whose files are still there
}

// leave starts an entry's end: the policy hears of it and lookups miss. expelled ends it, after its files are unlinked.
func (r *root) leave(slot uint32) departure {
	e := r.x.at(slot)
	d := departure{
		slot: slot, class: r.store.spaces.class(e.class), key: r.x.key(slot), pieces: r.x.pieces(slot), detour: e.is(stDetour),
	}
	e.set(stLeaving)
	e.unset(stAnnounced)
	if e.is(stComplete) {
		r.complete--
	}
	f := r.flights[slot]
	f.expelling = true
	r.flights[slot] = f
	r.event(abi.OpRemove, slot, r.x.print(e.class, d.key), none, 0)
	return d
}

// unlink removes the files of an entry's pieces and returns the bytes of those that would not go. mu is not held.
func (r *root) unlink(d *departure, pieces uint64) (stray int64) {
	for rank := range uint32(chunk.MaxRanks) {
		if pieces&(1<<rank) == 0 {
			continue
		}
		name, err := r.locatePiece(d.class, &d.key, rank, d.detour)
		if err != nil {
			r.log.Error("a piece has no name; its bytes stay accounted until the next start", "key", d.key, "error", err)
			stray += d.class.fileBytes
			continue
		}
		left, vanished := r.remove(name)
		stray += left
		if vanished {
			r.counted(&r.count.vanished)
		}
	}
	return stray
}

// remove unlinks a file. It says how many bytes are still taken because the file would not go, and whether it was gone
// already. An unlink can report an error although it happened, so the name is looked at again.
func (r *root) remove(name string) (left int64, vanished bool) {
	err := r.fs.Remove(name)
	if err == nil {
		return 0, false
	}
	if errors.Is(err, fs.ErrNotExist) {
		return 0, true
	}
	info, serr := r.fs.Stat(name)
	if errors.Is(serr, fs.ErrNotExist) {
		return 0, false
	}
	r.log.Error("a file could not be unlinked; its bytes stay accounted until the next start", "file", name, "error", err)
	return padded(info.Allocated), false
}

// locatePiece is the path of a published piece. Only an entry with a detour can have one under the built-in name, and
// what stands under the other name may then be somebody else's: the header tells.
func (r *root) locatePiece(c *class, k *chunk.Key, rank uint32, detour bool) (string, error) {
	name, err := r.path(c, k, rank, false)
	if !detour {
		return name, err
	}
	if err == nil {
		if h, herr := r.readHeader(name); herr == nil && h.Key == *k && h.Namespace == c.ns.digest && h.Group == c.group && h.Rank == rank {
			return name, nil
		}
	}
	return r.path(c, k, rank, true)
}

// expelled is called once an entry's files are unlinked.
func (r *root) expelled(d *departure) {
	e := r.x.at(d.slot)
	n := min(d.stray, e.bytes())
	e.size -= uint32(n / abi.SizeUnit)
	r.stray += n
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
	e := r.x.at(slot)
	if !e.is(stLeaving) {
		return
	}
	if !e.is(stDetached) {
		if _, busy := r.flights[slot]; busy {
			return
		}
		r.x.detach(slot)
		r.settled.Broadcast()
	}
	if e.pins == 0 {
		r.used -= e.bytes()
		r.x.release(slot)
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
	d.stray = r.unlink(&d, d.pieces&^keep)
	r.mu.Lock()
	r.expelled(&d)
	r.mu.Unlock()
}

// stands says whether a mark still names a live entry.
func (r *root) stands(m mark) bool {
	if m.slot >= r.x.high {
		return false
	}
	e := r.x.at(m.slot)
	return e.is(stLive) && !e.is(stLeaving) && r.x.slotPrint(m.slot) == m.print
}

// wake nudges the background evictor.
func (r *root) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}
