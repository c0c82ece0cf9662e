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

// Temp returns the name of a temporary, which is that of its target: a temporary is not visible to other hosts.
func (m *Member) Temp(name string, credit shared.Credit) (string, error) {
	if credit.Bytes() == 0 {
		return "", fmt.Errorf("%w: %s", shared.ErrCredit, name)
	}
	if !m.Holds(credit) {
		return "", shared.ErrFenced
	}
	return name, nil
}

// Publish stores a temporary as the object target. It fails with fs.ErrExist if the object exists. The credit is spent; it is
// corrected from the reserved bytes to r.Bytes. If it is unknown whether the object was stored, the error is ErrDoubt, and the
// member keeps the credit until it has found out.
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
		there, look := d.look(m) // An earlier attempt may have taken the name.
		switch {
		case there:
			_ = m.cfg.FS.Remove(temp) // frees its buffers
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

// doubt is a publication that may have taken effect, or may still.
type doubt struct {
	target string
	info   staging.Info
	record shared.Record
	credit shared.Credit
	since  time.Duration
	there  bool
}

// look reports whether the published object exists.
func (d *doubt) look(m *Member) (there bool, err error) {
	info, err := m.cfg.FS.Stat(d.target)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && info.Same(d.info), err
}

// settleDoubts checks the publications in doubt. If the object has not appeared within landing, the publication counts as
// failed; an audit finds it if it appears later.
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
			left = append(left, d) // The put has not ended, or its outcome is still unknown.
		case !d.there || !m.Published(d.record, d.credit, &m.Credits):
			m.Give(d.credit)
		}
	}
	m.mu.Lock()
	m.doubts = append(left, m.doubts...)
	m.mu.Unlock()
}
