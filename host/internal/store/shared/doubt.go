package shared

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/staging"
)

// A link that reports an error may have been made all the same: a network file system loses the reply, or the call was
// given up and goes on. How many names the temporary has tells. While nobody can look, the publication is in doubt: the
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
// link that it made. The error is ErrDoubt while nobody can tell.
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

// happened looks whether the link was made. One that was not can be made no more. No file is open meanwhile: a client of
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
	// What has the target's name is a piece of this key. Whose it is nobody can tell when the temporary has gone.
	now, err := t.fs.Stat(d.target)
	if absent(err) {
		return false, nil
	}
	return err == nil && (gone || now.Same(info)), err
}
