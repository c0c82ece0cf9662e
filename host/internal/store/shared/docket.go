package shared

import (
	"maps"
	"slices"
)

// docket is a member's state of the log records and batches of victims that it has read. It is used by Step only.
type docket struct {
	back Backend

	vetoes   map[uint64][]uint16 // indices of the vetoed victims, for each acknowledged batch whose decision is not applied yet
	batches  map[uint64][]Victim // victims of these batches
	forced   map[ID]Victim       // damaged entries that the evictor should evict
	reported map[ID]bool         // damaged entries that are in a batch
	later    []Record            // records that arrived while this host was writing the same piece
}

// begin resets the docket for an incarnation.
func (d *docket) begin(back Backend) {
	*d = docket{
		back: back, vetoes: map[uint64][]uint16{}, batches: map[uint64][]Victim{}, forced: map[ID]Victim{}, reported: map[ID]bool{},
	}
}

// learnLater passes on the records that the store could not take while it wrote the same entry. It must be called before the
// logs are read, so that every entry is known before it is proposed.
func (d *docket) learnLater() {
	later := d.later
	d.later = nil
	for i := range later {
		d.learn(&later[i])
	}
}

// learn applies a record of a log.
func (d *docket) learn(r *Record) {
	switch r.Op {
	case Published, Relayed:
		if !d.back.Learn(r) {
			d.later = append(d.later, *r)
		}
	case Touched:
		d.back.Touched(r.Fingerprints)
	case Damaged:
		if !d.reported[r.ID()] && len(d.forced) < maxForced { // An evictor will propose it.
			d.forced[r.ID()] = r.Victim()
		}
	}
}

const maxForced = 1 << 16

// acknowledge stops granting the victims of a batch, and vetoes those that are in use.
func (d *docket) acknowledge(n uint64, victims []Victim) {
	d.proposed(victims)
	vetoes := []uint16{}
	for i := range victims {
		if !d.back.Propose(&victims[i]) {
			vetoes = append(vetoes, uint16(i))
		}
	}
	d.vetoes[n], d.batches[n] = vetoes, victims
}

// proposed notes that victims are in a batch.
func (d *docket) proposed(victims []Victim) {
	for i := range victims {
		d.reported[victims[i].ID()] = true
		delete(d.forced, victims[i].ID())
	}
}

// unreport notes that a batch of victims ended unread, so that they can be reported again.
func (d *docket) unreport(victims []Victim) {
	for i := range victims {
		delete(d.reported, victims[i].ID())
	}
}

// retire applies a decision. If known is false the decision is no longer there: the batch was decided before this member
// acknowledged it, and the store checks at the next use of a victim whether it still exists.
func (d *docket) retire(n uint64, known bool, spared func(i int) bool) {
	victims := d.batches[n]
	for i := range victims {
		v := &victims[i]
		delete(d.reported, v.ID())
		removed := known && !spared(i)
		if !removed && slices.Contains(d.vetoes[n], uint16(i)) {
			continue // It was vetoed here, so it was never withheld.
		}
		d.back.Decide(v, removed)
	}
	delete(d.batches, n)
	delete(d.vetoes, n)
}

// choose returns up to most damaged entries, and victims that free excess bytes. It skips the proposed entries, and adds to
// them.
func (d *docket) choose(proposed map[ID]bool, excess int64, most int) (victims []Victim) {
	add := func(v Victim) {
		if id := v.ID(); !proposed[id] {
			proposed[id] = true
			victims = append(victims, v)
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(d.forced), ID.Compare) {
		if len(victims) == most {
			break
		}
		add(d.forced[id])
	}
	if excess > 0 {
		for _, v := range d.back.Victims(excess) {
			add(v)
		}
	}
	return victims
}
