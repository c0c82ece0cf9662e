package shared

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// batchFile is the content of a batch: victims, or a member that is forgotten once all others have read its log.
type batchFile struct {
	Forget  string `json:"forget,omitempty"`
	Victims []byte `json:"victims,omitempty"` // encoded records
}

// decision ends a batch.
type decision struct {
	Spared []int `json:"spared,omitempty"` // indices of the victims that were not removed
	All    bool  `json:"all,omitempty"`    // set if members must treat all victims as spared: none was removed, or it is unknown which were
}

func (d *decision) spared(i int) bool { return d.All || slices.Contains(d.Spared, i) }

func encodeVictims(list []Victim) (b []byte) {
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

func decodeVictims(b []byte) (list []Victim, err error) {
	for len(b) > 0 {
		r, n, err := DecodeRecord(b)
		if err != nil {
			return nil, err
		}
		if len(list) == maxBatch {
			return nil, fmt.Errorf("%w: a batch of more than %d victims", ErrDamaged, maxBatch)
		}
		b = b[n:]
		list = append(list, r.Victim())
	}
	return list, nil
}

// apply applies decisions and acknowledges batches. Decisions come first: a spared victim may be proposed again at once.
func (m *Member) apply() error {
	if m.view.batches == nil {
		return nil
	}
	if !m.listed {
		m.listed = true
		for n := range m.view.batches {
			m.earliest = max(m.earliest, n+1)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(m.batches)) {
		decided, known := m.view.batches[n]
		if known && !decided {
			continue
		}
		var d decision
		if known {
			var err error
			if d, err = m.medium.decision(n); missing(err) {
				known = false
			} else if errors.Is(err, ErrDamaged) {
				m.log.Error("cannot read a decision; its remaining victims are kept", "batch", n, "error", err)
				d.All = true
			} else if err != nil {
				return err
			}
		}
		// A victim may have been removed before this host was admitted, which has stored it again since.
		d.All = d.All || n < m.earliest
		m.retire(n, known, d.spared)
	}
	for _, n := range slices.Sorted(maps.Keys(m.view.batches)) {
		if _, acked := m.docket.vetoes[n]; acked || m.view.batches[n] {
			continue
		}
		forget, victims, err := m.medium.batch(n)
		switch p := m.peers[forget]; {
		case missing(err):
		case errors.Is(err, ErrDamaged):
			m.log.Warn("cannot read a batch of victims; it is read again", "batch", n, "error", err)
		case err != nil:
			return err
		case forget == "" || p == nil || p.ended: // The log of a member that is forgotten must be read first.
			m.acknowledge(n, victims)
		}
	}
	return nil
}
