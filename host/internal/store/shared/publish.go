package shared

import (
	"errors"
	"fmt"
	"sync"
)

// pending is what this member published, touched or found damaged and has not logged yet.
type pending struct {
	mu           sync.Mutex
	life         uint64
	records      []Record
	temps        []string // names to remove once the records are logged
	doubts       []doubt
	fingerprints []uint64
	held         map[uint64]struct{}
}

// maxTouches bounds the touches logged in one step; the first ones are logged.
const maxTouches = 1 << 13

// end forgets everything with an incarnation, and returns what was in doubt.
func (p *pending) end() (doubts []doubt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	doubts = p.doubts
	p.life, p.records, p.temps, p.doubts, p.fingerprints, p.held = 0, nil, nil, nil, nil, nil
	return doubts
}

// begin follows when the next incarnation begins. What was found damaged since the end is kept.
func (p *pending) begin(life uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.life, p.held = life, map[uint64]struct{}{}
}

func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.records)
}

// Temp returns the path of a temporary with this name, which may take the credit's bytes. It is in the directory of the
// incarnation that took the credit, so that it goes with it. It fails with ErrFenced when the credit is void.
func (m *Member) Temp(base string, credit Credit) (string, error) {
	if credit.bytes == 0 {
		return "", fmt.Errorf("%w: %s", ErrCredit, base)
	}
	if !m.Holds(credit) {
		return "", ErrFenced
	}
	return m.hosts() + "/" + m.cfg.member(credit.life) + "/t/" + base, nil
}

// Publish links a temporary to its target name, or fails with fs.ErrExist. Afterwards the temporary belongs to the
// member. The spent credit is corrected from the reserved bytes to r.Bytes. When nobody can tell whether the link was
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
	// Credit is spent only with its record: an incarnation's records end before its credit does.
	if p.life != credit.life || !m.credits.publish(credit, r.Bytes) {
		return false
	}
	p.records = append(p.records, r)
	p.temps = append(p.temps, temp)
	return true
}

// Touch tells the others at the next step that an entry was used.
func (m *Member) Touch(fingerprint uint64) {
	p := &m.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, again := p.held[fingerprint]; again || len(p.fingerprints) == maxTouches || p.held == nil {
		return
	}
	p.held[fingerprint] = struct{}{}
	p.fingerprints = append(p.fingerprints, fingerprint)
}

// ReportDamaged tells the evictor at the next step that an entry is damaged. r.Pieces are the ranks to remove.
func (m *Member) ReportDamaged(r Record) {
	r.Op = Damaged
	m.pending.mu.Lock()
	m.pending.records = append(m.pending.records, r)
	m.pending.mu.Unlock()
	m.Wake()
}
