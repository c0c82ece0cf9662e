package bucket

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// Temp returns the name of a temporary: the one next to its target. No other host sees it.
func (m *Member) Temp(name string, credit shared.Credit) (string, error) {
	if credit.Bytes() == 0 {
		return "", fmt.Errorf("%w: %s", shared.ErrCredit, name)
	}
	if !m.Holds(credit) {
		return "", shared.ErrFenced
	}
	return name, nil
}

// Publish makes a temporary the object of its target name, or fails with fs.ErrExist. The spent credit is corrected from the reserved
// bytes to r.Bytes. When it is unknown whether the object was made the error is ErrDoubt; the credit belongs to the member then, which
// finds out.
func (m *Member) Publish(temp, target string, r shared.Record, credit *shared.Credit) error {
	if credit.Bytes() == 0 {
		return fmt.Errorf("%w: %s", shared.ErrCredit, target)
	}
	if !m.Holds(*credit) {
		return shared.ErrFenced
	}
	info, err := m.cfg.FS.Stat(temp)
	if err != nil {
		return err
	}
	if err = m.cfg.FS.RenameNoReplace(temp, target); err != nil && !errors.Is(err, unix.EAGAIN) {
		d := doubt{target: target, info: info, record: r, credit: *credit, since: m.cfg.Now()}
		there, look := d.look(m) // also where the name is taken: by an earlier attempt, perhaps
		switch {
		case there:
			_ = m.cfg.FS.Remove(temp) // its buffers
			err = nil
		case look != nil || !errors.Is(err, fs.ErrExist):
			m.mu.Lock()
			m.doubts = append(m.doubts, d)
			m.mu.Unlock()
			*credit = shared.Credit{}
			return errors.Join(fmt.Errorf("%w: %w", shared.ErrDoubt, err), m.cfg.FS.Remove(temp))
		}
	}
	if err != nil {
		return err
	}
	if !m.Published(r, *credit, &m.Credits) {
		return fmt.Errorf("%w while it published %s", shared.ErrFenced, target)
	}
	return nil
}

// doubt is a publication that may have happened, or may happen yet.
type doubt struct {
	target string
	info   staging.Info
	record shared.Record
	credit shared.Credit
	since  time.Duration
	there  bool
}

// look says whether the object is there that was to be made.
func (d *doubt) look(m *Member) (there bool, err error) {
	info, err := m.cfg.FS.Stat(d.target)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && info.Same(d.info), err
}

// settleDoubts looks what became of publications in doubt. One that has not appeared by the time in which requests land is taken for
// one that was not made; what appears later an audit finds.
func (m *Member) settleDoubts(now time.Duration) {
	m.mu.Lock()
	list := m.doubts
	m.doubts = nil
	m.mu.Unlock()
	var left []doubt
	for _, d := range list {
		var err error
		if !d.there {
			d.there, err = d.look(m)
		}
		switch {
		case d.there && !m.back.Learn(&d.record), err != nil, !d.there && now-d.since <= m.cfg.landing():
			left = append(left, d) // its put has not ended, or nothing is known yet
		case !d.there || !m.Published(d.record, d.credit, &m.Credits):
			m.Give(d.credit)
		}
	}
	m.mu.Lock()
	m.doubts = append(left, m.doubts...)
	m.mu.Unlock()
}
