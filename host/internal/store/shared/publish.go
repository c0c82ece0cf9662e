package shared

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// doubt is a publication that may have happened, or may still.
type doubt struct {
	temp, target string
	record       Record
	credit       Credit
	info         staging.Info // of the temporary
	since        time.Duration
	made         bool // set once the publication is known to have happened
}

// Temp returns the path of a temporary. name is the path that it would have next to its target. The temporary may take as many
// bytes as the credit. Temp returns ErrFenced if the credit is void.
func (m *Member) Temp(name string, credit Credit) (string, error) {
	if err := m.may(credit, name); err != nil {
		return "", err
	}
	return m.medium.temp(name, credit), nil
}

// may returns an error if a file may not be written with the credit.
func (m *Member) may(credit Credit, name string) error {
	if credit.bytes == 0 {
		return fmt.Errorf("%w: %s", ErrCredit, name)
	}
	if !m.Holds(credit) {
		return ErrFenced
	}
	return nil
}

// Publish gives a temporary its target name. It returns fs.ErrExist if the name exists. Afterwards the temporary belongs to the
// member. The credit is spent; it is corrected from the reserved bytes to r.Bytes. If it is unknown whether the temporary has
// the name, the error is ErrDoubt, and the member keeps the temporary and the credit until it has found out.
func (m *Member) Publish(temp, target string, r Record, credit *Credit) error {
	if err := m.may(*credit, target); err != nil {
		return err
	}
	d := doubt{temp: temp, target: target, record: r, credit: *credit, since: m.cfg.Now()}
	made, err := m.medium.store(&d)
	switch {
	case errors.Is(err, ErrDoubt) && !m.doubt(d):
		return fmt.Errorf("%w: %v", ErrFenced, err) // not ErrDoubt: the caller keeps the credit
	case errors.Is(err, ErrDoubt):
		*credit = Credit{}
		return err
	case !made:
		return err
	}
	if !m.enter(&d, &m.credits) {
		return fmt.Errorf("%w while it published %s", ErrFenced, target)
	}
	return nil
}

// settleDoubts checks the publications in doubt.
func (m *Member) settleDoubts() error {
	var errs []error
	for _, d := range m.takeDoubts() {
		var over bool
		var err error
		if !d.made {
			d.made, over, err = m.medium.happened(&d)
			errs = append(errs, err)
		}
		var settled bool
		switch {
		case d.made && !m.back.Learn(&d.record): // The put has not ended.
			settled = !m.doubt(d)
		case d.made:
			settled = !m.enter(&d, &m.credits)
		default:
			settled = over && err == nil || !m.doubt(d)
		}
		if settled {
			m.Give(d.credit)
		}
	}
	return errors.Join(errs...)
}

// flush writes the outbox to the log, after the attempt that failed before. A member that is not admitted does not log.
func (m *Member) flush(now time.Duration) error {
	if !m.admitted {
		return nil
	}
	for range 2 {
		if m.retry == nil {
			a := m.outbox.take()
			if len(a.records) == 0 {
				break
			}
			m.retry = a
		}
		for len(m.retry.records) > 0 {
			part := m.retry.part()
			if err := m.medium.append(part, now); err != nil {
				return err
			}
			m.published += part.published()
			for i := range part.records {
				if r := &part.records[i]; r.Op == Damaged {
					m.docket.learn(r)
				}
			}
			m.retry.records = m.retry.records[len(part.records):]
		}
		m.retry = nil
	}
	m.relayed = false
	return m.medium.tidy(now)
}
