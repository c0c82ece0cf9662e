package shared

import (
	"maps"
	"slices"
)

// Docket is a member's state of the log records and batches of victims that it has read. It is used by Step only.
type Docket struct {
	back Backend

	Vetoes   map[uint64][]int    // indices of the vetoed victims, for each acknowledged batch whose decision is not applied yet
	Batches  map[uint64][]Victim // victims of these batches
	forced   map[ID]Victim       // damaged entries that the evictor should evict
	reported map[ID]bool         // damaged entries that are in a batch
	later    []Record            // records that arrived while this host was writing the same piece
}

// Begin resets the docket for an incarnation.
func (d *Docket) Begin(back Backend) {
	*d = Docket{
		back: back, Vetoes: map[uint64][]int{}, Batches: map[uint64][]Victim{}, forced: map[ID]Victim{}, reported: map[ID]bool{},
	}
}

// LearnLater passes on the records that the store could not take while it wrote the same entry. It must be called before the
// logs are read, so that every entry is known before it is proposed.
func (d *Docket) LearnLater() {
	later := d.later
	d.later = nil
	for i := range later {
		d.Learn(&later[i])
	}
}

// Learn applies a record of a log.
func (d *Docket) Learn(r *Record) {
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

// Acknowledge stops granting the victims of a batch, and vetoes those that are in use.
func (d *Docket) Acknowledge(n uint64, victims []Victim) {
	d.Proposed(victims)
	vetoes := []int{}
	for i := range victims {
		if !d.back.Propose(&victims[i]) {
			vetoes = append(vetoes, i)
		}
	}
	d.Vetoes[n], d.Batches[n] = vetoes, victims
}

// Proposed notes that victims are in a batch.
func (d *Docket) Proposed(victims []Victim) {
	for i := range victims {
		d.reported[victims[i].ID()] = true
		delete(d.forced, victims[i].ID())
	}
}

// Retire applies a decision. If known is false the decision is no longer there: the batch was decided before this member
// acknowledged it, and the store checks at the next use of a victim whether it still exists.
func (d *Docket) Retire(n uint64, known bool, spared func(i int) bool) {
	victims := d.Batches[n]
	for i := range victims {
		v := &victims[i]
		delete(d.reported, v.ID())
		removed := known && !spared(i)
		if !removed && slices.Contains(d.Vetoes[n], i) {
			continue // It was vetoed here, so it was never withheld.
		}
		d.back.Decide(v, removed)
	}
	delete(d.Batches, n)
	delete(d.Vetoes, n)
}

// Choose returns up to most damaged entries, and victims that free excess bytes. It skips the proposed entries, and adds to
// them.
func (d *Docket) Choose(proposed map[ID]bool, excess int64, most int) (victims []Victim) {
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
