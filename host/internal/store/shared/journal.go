package shared

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// In the evictor's journal, j<n> is the proposal of a batch and d<n> its decision.

// batchFile is the content of a proposal: victims, or a member that is removed once all others have read its log.
type batchFile struct {
	Forget  string `json:"forget,omitempty"`
	Victims []byte `json:"victims,omitempty"` // encoded records
}

// decisionFile is the content of a decision, which ends a batch.
type decisionFile struct {
	Spared []int `json:"spared,omitempty"` // indices of the victims that were not removed
	All    bool  `json:"all,omitempty"`    // set if members must treat all victims as spared: none was removed, or it is unknown which were
}

func (d *decisionFile) spared(i int) bool { return d.All || slices.Contains(d.Spared, i) }

// batch is a proposal in memory.
type batch struct {
	forget  string
	victims []Victim
}

func (b *batch) file() batchFile {
	return batchFile{b.forget, EncodeVictims(b.victims)}
}

func EncodeVictims(list []Victim) (b []byte) {
	for i := range list {
		v := &list[i]
		r := Record{
			Op: Damaged, Names: v.Names, Namespace: v.Namespace, Group: v.Group, Key: v.Key, Pieces: v.Pieces,
			Bytes: v.Bytes,
		}
		b = r.Append(b)
	}
	return b
}

func DecodeVictims(b []byte) (list []Victim, err error) {
	for len(b) > 0 {
		r, n, err := DecodeRecord(b)
		if err != nil {
			return nil, err
		}
		b = b[n:]
		list = append(list, r.Victim())
	}
	return list, nil
}

func (f *batchFile) batch() (*batch, error) {
	victims, err := DecodeVictims(f.Victims)
	return &batch{f.Forget, victims}, err
}

func (b *batch) bytes() (n int64) {
	for i := range b.victims {
		n += b.victims[i].Bytes
	}
	return n
}

func proposalName(dir string, n uint64) string { return dir + "/journal/j" + strconv.FormatUint(n, 10) }
func decisionName(dir string, n uint64) string { return dir + "/journal/d" + strconv.FormatUint(n, 10) }

// journal lists the batches in an evictor's directory.
type journal struct {
	dir               string // empty if there is none to be read
	proposed, decided map[uint64]bool
}

// readNames lists the batches of the journal in dir.
func (t *tree) readNames(dir string) (journal, error) {
	j := journal{dir, map[uint64]bool{}, map[uint64]bool{}}
	names, err := t.list(dir + "/journal")
	for _, name := range names {
		n, perr := strconv.ParseUint(name[1:], 10, 64)
		switch {
		case perr != nil:
		case name[0] == 'j':
			j.proposed[n] = true
		case name[0] == 'd':
			j.decided[n] = true
		}
	}
	return j, err
}

// journal lists the batches of the evictor. It lists none until the evictor has copied the journals of earlier epochs.
func (e *evictorSeen) journal(t *tree) (journal, error) {
	if !e.beat.Took {
		return journal{}, nil
	}
	j, err := t.readNames(t.epochDir(e.epoch))
	if err != nil {
		return j, err
	}
	if there, err := t.look(j.dir); !there {
		return journal{}, err // The evictor was deposed; its successor continues with the same batches.
	}
	return j, nil
}

// apply applies decisions and acknowledges proposals.
func (m *Member) apply(j journal) error {
	if j.dir == "" {
		return nil
	}
	// Decisions come first: a spared victim may be proposed again at once.
	for _, n := range slices.Sorted(maps.Keys(m.Batches)) {
		if err := m.retire(n, j); err != nil {
			return err
		}
	}
	for _, n := range slices.Sorted(maps.Keys(j.proposed)) {
		if _, acked := m.Docket.Vetoes[n]; acked || j.decided[n] {
			continue
		}
		if err := m.acknowledge(j.dir, n); err != nil && !missing(err) {
			return err
		}
	}
	return nil
}

func (m *Member) acknowledge(dir string, n uint64) error {
	var f batchFile
	err := m.get(proposalName(dir, n), &f)
	var b *batch
	if err == nil {
		b, err = f.batch()
	}
	if errors.Is(err, ErrDamaged) {
		m.log.Error("cannot read a batch of victims; nothing is evicted until another host is the evictor",
			"batch", n, "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	if b.forget != "" {
		if t := m.tails[b.forget]; t != nil && !t.ended || t == nil && !m.absent(m.gone()+"/"+b.forget) {
			return nil // The member's log must be read first.
		}
	}
	m.Acknowledge(n, b.victims)
	return nil
}

// retire applies the decision of a batch, if there is one.
func (m *Member) retire(n uint64, j journal) error {
	var d decisionFile
	known := j.decided[n]
	switch {
	case known:
		if err := m.get(decisionName(j.dir, n), &d); missing(err) {
			known = false
		} else if errors.Is(err, ErrDamaged) {
			m.log.Error("cannot read a decision; its remaining victims are kept", "batch", n, "error", err)
			d.All = true
		} else if err != nil {
			return fmt.Errorf("batch %d: %w", n, err)
		}
	case j.proposed[n]:
		return nil
	}
	m.Retire(n, known, d.spared)
	return nil
}
