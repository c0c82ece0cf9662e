package shared

import "slices"

// attempt is one write of the log and the temporaries to remove after it. A failed attempt is repeated unchanged before
// any other: it goes to the same place, and other hosts may have read it to its end.
type attempt struct {
	records []Record
	temps   []string
	written bool
}

// flush writes the log.
func (m *Member) flush() error {
	var left []string
	if m.retry != nil {
		if err := m.retry.record(m); err != nil {
			return err
		}
		left = m.retry.temps
	}
	p := &m.pending
	p.mu.Lock()
	a := &attempt{records: p.records, temps: append(left, p.temps...)}
	fingerprints := p.fingerprints
	p.records, p.temps, p.fingerprints = nil, nil, nil
	clear(p.held)
	p.mu.Unlock()
	for part := range slices.Chunk(fingerprints, recordFingerprints) {
		a.records = append(a.records, Record{Op: Touched, Fingerprints: part})
	}
	return a.record(m)
}

// record writes an attempt's records. The member keeps it until its temporaries are gone.
func (a *attempt) record(m *Member) error {
	m.retry = a
	if a.written {
		return nil
	}
	if err := m.out.append(&m.tree, m.dir, m.cfg.LogBytes, a.records); err != nil {
		if missing(err) && m.absent(m.dir) {
			return ErrFenced
		}
		return err
	}
	a.written = true
	for i := range a.records {
		if a.records[i].Op == Damaged {
			m.noteDamaged(&a.records[i])
		}
	}
	return nil
}

// clear removes the names of temporaries whose publication the log has.
func (a *attempt) clear(m *Member) error {
	for ; len(a.temps) > 0; a.temps = a.temps[1:] {
		if err := m.remove(a.temps[0]); err != nil {
			return err
		}
	}
	m.retry = nil
	return nil
}
