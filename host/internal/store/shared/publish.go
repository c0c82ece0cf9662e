package shared

import (
	"errors"
	"fmt"
	"path"

	"github.com/kvhost/kvhost/staging"
)

// pending holds the records that are not logged yet, and the names that are removed after they are. The lock of the outbox
// guards it.
type pending struct {
	Outbox
	temps  []string // names to remove once the records are logged
	doubts []doubt
}

// end discards the state of an incarnation that ended, and returns its publications in doubt.
func (p *pending) end() (doubts []doubt) {
	p.End()
	p.mu.Lock()
	defer p.mu.Unlock()
	doubts = p.doubts
	p.temps, p.doubts = nil, nil
	return doubts
}

// Temp returns the path of a temporary. name is the path that it would have next to its target. The temporary may take as many
// bytes as the credit. Its directory is that of the incarnation that took the credit, and is removed with it. Temp returns
// ErrFenced if the credit is void.
func (m *Member) Temp(name string, credit Credit) (string, error) {
	if credit.bytes == 0 {
		return "", fmt.Errorf("%w: %s", ErrCredit, name)
	}
	if !m.Holds(credit) {
		return "", ErrFenced
	}
	return m.hosts() + "/" + m.cfg.member(credit.life) + "/t/" + path.Base(name), nil
}

// Publish links a temporary to its target name. It returns fs.ErrExist if the name exists. Afterwards the temporary belongs to
// the member. The credit is spent; it is corrected from the reserved bytes to r.Bytes. If it is unknown whether the link was
// made, the error is ErrDoubt, and the member keeps the temporary and the credit until it has found out.
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

// published adds a publication to the outbox. It returns false if the credit is void: the temporary is then in the directory of
// an expelled incarnation, where the evictor finds its second name.
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

// A link call that returns an error may have succeeded: a network file system may lose the reply, or the call was abandoned and
// continues. The link count of the temporary tells. While it cannot be read, the publication is in doubt: the temporary keeps
// its name and its credit, and each step checks again.

// doubt is a publication that may have happened.
type doubt struct {
	temp, target string
	record       Record
	credit       Credit
	linked       bool // set once the link is known to be made
}

// doubt adds a publication in doubt. It returns false if the credit is void.
func (p *pending) doubt(d doubt) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life != d.credit.life {
		return false
	}
	p.doubts = append(p.doubts, d)
	return true
}

// link links a temporary to its target name. made reports whether the temporary has that name, even if the file system returned
// an error. The error is ErrDoubt if this is unknown.
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
	// fs.ErrExist must not be returned here: the file under the name may be this temporary rather than another host's piece.
	return false, fmt.Errorf("%w: linking %s: %v; the look at it: %v", ErrDoubt, target, err, serr)
}

// settleDoubts checks the publications in doubt.
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
		return false, nil // The put has not ended.
	}
	if !d.linked || !m.published(d.temp, d.record, d.credit) {
		m.Give(d.credit)
	}
	return true, nil
}

// happened checks whether the link was made. If not, it removes the temporary, so that the link can no longer succeed. No file
// is open during the check: a client of a network file system renames a file that it has open instead of removing it, and the
// link count would be wrong.
func (d *doubt) happened(t *tree) (bool, error) {
	info, err := t.fs.Stat(d.temp)
	if err == nil && info.Links > 1 {
		return true, nil
	}
	gone := absent(err) // The temporary went with the incarnation, or in an earlier check that failed half way.
	if err == nil {
		err = t.remove(d.temp)
	}
	if err != nil && !gone {
		return false, err
	}
	// The file under the target name is a piece of the same key. If the temporary is gone it cannot be told which host
	// published it.
	now, err := t.fs.Stat(d.target)
	if absent(err) {
		return false, nil
	}
	return err == nil && (gone || now.Same(info)), err
}

// attempt is a write of the log, and the temporaries to remove after it. A failed attempt is repeated unchanged before any
// other: it writes to the same offset, and other hosts may have read it.
type attempt struct {
	records []Record
	temps   []string
	written bool
}

// flush writes the outbox to the log, after the attempt that failed before.
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

// record writes the records of an attempt. The member keeps the attempt until its temporaries are removed.
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

// clear removes the names of the temporaries, which are logged as published.
func (a *attempt) clear(m *Member) error {
	for ; len(a.temps) > 0; a.temps = a.temps[1:] {
		if err := m.remove(a.temps[0]); err != nil {
			return err
		}
	}
	m.retry = nil
	return nil
}
