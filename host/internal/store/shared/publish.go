package shared

import (
	"errors"
	"fmt"
	"path"

	"github.com/kvhost/kvhost/staging"
)

// pending is what this member has yet to log, and the names that go then. The lock of the outbox guards all.
type pending struct {
	Outbox
	temps  []string // names to remove once the records are logged
	doubts []doubt
}

// end forgets everything with an incarnation, and returns what was in doubt.
func (p *pending) end() (doubts []doubt) {
	p.End()
	p.mu.Lock()
	defer p.mu.Unlock()
	doubts = p.doubts
	p.temps, p.doubts = nil, nil
	return doubts
}

// Temp returns the path of a temporary, given the one that it would have next to its target. It may take the credit's bytes. It is in the directory of the
// incarnation that took the credit, so that it goes with it. It fails with ErrFenced when the credit is void.
func (m *Member) Temp(name string, credit Credit) (string, error) {
	if credit.bytes == 0 {
		return "", fmt.Errorf("%w: %s", ErrCredit, name)
	}
	if !m.Holds(credit) {
		return "", ErrFenced
	}
	return m.hosts() + "/" + m.cfg.member(credit.life) + "/t/" + path.Base(name), nil
}

// Publish links a temporary to its target name, or fails with fs.ErrExist. Afterwards the temporary belongs to the
// member. The spent credit is corrected from the reserved bytes to r.Bytes. When it is unknown whether the link was
// made the error is ErrDoubt; temporary and credit belong to the member then too, which finds out.
func (m *Member) Publish(temp, target string, r Record, credit *Credit) error {
	if credit.bytes == 0 {
		return fmt.Errorf("%w: %s", ErrCredit, target)
	}
	if !m.Holds(*credit) {
		return ErrFenced
	}
	made, err := m.link(temp, target)
	switch {
	case errors.Is(err, ErrDoubt):
		if !m.pending.doubt(doubt{temp: temp, target: target, record: r, credit: *credit}) {
			return fmt.Errorf("%w: %w", ErrFenced, err)
		}
		*credit = Credit{}
		return err
	case !made && missing(err) && m.absent(temp):
		return fmt.Errorf("%w: %w", ErrFenced, err)
	case !made:
		return err
	}
	if !m.published(temp, r, *credit) {
		return fmt.Errorf("%w while it published %s", ErrFenced, target)
	}
	return nil
}

// published notes a publication for the log. It is false when the credit is void: then the temporary is among those of
// a member that is gone, where the evictor finds its second name.
func (m *Member) published(temp string, r Record, credit Credit) bool {
	p := &m.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.publish(r, credit, &m.Credits) {
		return false
	}
	p.temps = append(p.temps, temp)
	return true
}

// A link that reports an error may have been made all the same: a network file system loses the reply, or the call was
// given up and goes on. How many names the temporary has tells. While they cannot be counted, the publication is in doubt: the
// temporary keeps its name and its credit, and each step looks again.

// doubt is a publication that may have happened.
type doubt struct {
	temp, target string
	record       Record
	credit       Credit
	linked       bool // it happened
}

// doubt notes a publication that may have happened. It is false when the credit is void.
func (p *pending) doubt(d doubt) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life != d.credit.life {
		return false
	}
	p.doubts = append(p.doubts, d)
	return true
}

// link gives a temporary its target name. made says that it has it, also when the file system reports an error for a
// link that it made. The error is ErrDoubt while that is unknown.
func (t *tree) link(temp, target string) (made bool, err error) {
	if err = t.fs.Link(temp, target); err == nil {
		return true, nil
	}
	if absent(err) {
		return false, err
	}
	info, serr := t.fs.Stat(temp)
	switch {
	case serr == nil && info.Links > 1:
		return true, nil
	case serr == nil && !errors.Is(err, staging.ErrHung), absent(serr):
		return false, err
	}
	// An error that says that the name is taken must not be taken for another host's piece under it.
	return false, fmt.Errorf("%w: linking %s: %v; the look at it: %v", ErrDoubt, target, err, serr)
}

// settleDoubts looks what became of publications in doubt.
func (m *Member) settleDoubts() error {
	p := &m.pending
	p.mu.Lock()
	list := p.doubts
	p.doubts = nil
	p.mu.Unlock()
	var errs []error
	for _, d := range list {
		settled, err := d.settle(m)
		if errs = append(errs, err); !settled && !p.doubt(d) {
			m.Give(d.credit)
		}
	}
	return errors.Join(errs...)
}

func (d *doubt) settle(m *Member) (settled bool, err error) {
	if !d.linked {
		if d.linked, err = d.happened(&m.tree); err != nil {
			return false, err
		}
	}
	if d.linked && !m.back.Learn(&d.record) {
		return false, nil // its put has not ended
	}
	if !d.linked || !m.published(d.temp, d.record, d.credit) {
		m.Give(d.credit)
	}
	return true, nil
}

// happened looks whether the link was made. One that was not can be made no more. No file is open during the look: a client of
// a network file system would rename one that it has open instead of removing it, and its names would tell nothing.
func (d *doubt) happened(t *tree) (bool, error) {
	info, err := t.fs.Stat(d.temp)
	if err == nil && info.Links > 1 {
		return true, nil
	}
	gone := absent(err) // with this incarnation, or in an earlier look that failed half way
	if err == nil {
		err = t.remove(d.temp)
	}
	if err != nil && !gone {
		return false, err
	}
	// What has the target's name is a piece of this key. Which host's it is cannot be told when the temporary has gone.
	now, err := t.fs.Stat(d.target)
	if absent(err) {
		return false, nil
	}
	return err == nil && (gone || now.Same(info)), err
}

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
	a := &attempt{records: p.take(), temps: append(left, p.temps...)}
	p.temps = nil
	p.mu.Unlock()
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
			m.Docket.Learn(&a.records[i])
		}
	}
	return nil
}

// clear removes the names of temporaries once the log has their publication.
func (a *attempt) clear(m *Member) error {
	for ; len(a.temps) > 0; a.temps = a.temps[1:] {
		if err := m.remove(a.temps[0]); err != nil {
			return err
		}
	}
	m.retry = nil
	return nil
}
