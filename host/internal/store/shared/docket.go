package shared

import (
	"maps"
	"slices"
)

// Docket is what a member has learned from the logs, and of batches of victims. It belongs to Step.
type Docket struct {
	back Backend

	Vetoes   map[uint64][]int    // acknowledged batches, until their decisions are applied: indices of vetoed victims
	Batches  map[uint64][]Victim // of them
	forced   map[ID]Victim       // damaged entries, for the evictor
	reported map[ID]bool         // those that are in a batch
	later    []Record            // published while this host was writing the same piece
}

// Begin begins the docket of an incarnation.
func (d *Docket) Begin(back Backend) {
	*d = Docket{
		back: back, Vetoes: map[uint64][]int{}, Batches: map[uint64][]Victim{}, forced: map[ID]Victim{}, reported: map[ID]bool{},
	}
}

// LearnLater learns what the store could not while it wrote the same entry itself. It goes before the logs: what is proposed later was
// known.
func (d *Docket) LearnLater() {
	later := d.later
	d.later = nil
	for i := range later {
		d.Learn(&later[i])
	}
}

// Learn takes a record of a log.
func (d *Docket) Learn(r *Record) {
	switch r.Op {
	case Published, Relayed:
		if !d.back.Learn(r) {
			d.later = append(d.later, *r)
		}
	case Touched:
		d.back.Touched(r.Fingerprints)
	case Damaged:
		if !d.reported[r.ID()] && len(d.forced) < maxForced { // the evictor, now or later, puts it into a batch
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

// Retire applies a decision. Where none is known any more the batch was decided before this member acknowledged it: the store checks on
// its next use whether a victim still exists.
func (d *Docket) Retire(n uint64, known bool, spared func(i int) bool) {
	victims := d.Batches[n]
	for i := range victims {
		v := &victims[i]
		delete(d.reported, v.ID())
		removed := known && !spared(i)
		if !removed && slices.Contains(d.Vetoes[n], i) {
			continue // vetoed here, so never withheld
		}
		d.back.Decide(v, removed)
	}
	delete(d.Batches, n)
	delete(d.Vetoes, n)
}

// Choose names damaged entries, at most so many, and victims that free as much as is in excess, but for those that are proposed already.
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
