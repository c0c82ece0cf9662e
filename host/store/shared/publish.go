package shared

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// pending is what this member published, touched or found damaged and has not logged yet.
type pending struct {
	mu           sync.Mutex
	life         uint64
	records      []Record
	temps        []string // names to remove once the records are logged
	fingerprints []uint64
	held         map[uint64]struct{}
}

// maxTouches bounds the touches logged in one step; the first ones are logged.
const maxTouches = 1 << 13

func (p *pending) reset(life uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.life, p.records, p.temps, p.fingerprints, p.held = life, nil, nil, nil, map[uint64]struct{}{}
}

func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.records)
}

// Temp returns the path of a temporary with this name. It fails with ErrFenced while this host is not admitted.
func (m *Member) Temp(base string) (string, error) {
	s := m.facts.Load()
	if s.State == Joining || !m.Fresh() {
		return "", ErrFenced
	}
	return m.hosts() + "/" + s.Member + "/t/" + base, nil
}

// Publish links a temporary to its target name, or fails with fs.ErrExist. Afterwards the temporary belongs to the
// member. The spent credit is corrected from the reserved bytes to r.Bytes.
func (m *Member) Publish(temp, target string, r Record, credit *Credit) error {
	if !m.Fresh() {
		return ErrFenced
	}
	if credit.bytes == 0 {
		return fmt.Errorf("%w: %s", ErrCredit, target)
	}
	if err := m.link(temp, target); err != nil {
		if missing(err) && !m.exists(temp) {
			return fmt.Errorf("%w: %w", ErrFenced, err)
		}
		return err
	}
	c := &m.credits
	c.mu.Lock()
	if credit.life == c.life {
		c.spent += r.Bytes - credit.bytes
	}
	c.mu.Unlock()
	m.pending.mu.Lock()
	defer m.pending.mu.Unlock()
	if m.pending.life == credit.life {
		m.pending.records = append(m.pending.records, r)
		m.pending.temps = append(m.pending.temps, temp)
	}
	return nil
}

// link succeeds also when the file system reports an error for a link that exists, as NFS does after a lost reply.
func (t *tree) link(temp, target string) error {
	err := t.fs.Link(temp, target)
	if err == nil {
		return nil
	}
	a, aerr := t.fs.Stat(temp)
	b, berr := t.fs.Stat(target)
	if aerr == nil && berr == nil && a.Same(b) {
		return nil
	}
	return err
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

// attempt is one write of the log and the temporaries to remove after it. A failed attempt is repeated unchanged before
// any other: it goes to the same place, and other hosts may have read it to its end.
type attempt struct {
	records []Record
	temps   []string
	written bool
}

// flush writes the log and then removes the temporaries' names.
func (m *Member) flush() error {
	if m.retry != nil {
		if err := m.send(m.retry); err != nil {
			return err
		}
	}
	p := &m.pending
	p.mu.Lock()
	a := &attempt{records: p.records, temps: p.temps}
	fingerprints := p.fingerprints
	p.records, p.temps, p.fingerprints = nil, nil, nil
	clear(p.held)
	p.mu.Unlock()
	for part := range slices.Chunk(fingerprints, recordFingerprints) {
		a.records = append(a.records, Record{Op: Touched, Fingerprints: part})
	}
	return m.send(a)
}

// send makes an attempt and keeps it for a retry when it fails.
func (m *Member) send(a *attempt) error {
	m.retry = a
	if !a.written {
		if err := m.out.append(&m.tree, m.dir, m.cfg.LogBytes, a.records); err != nil {
			if missing(err) && !m.exists(m.dir) {
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
	}
	for len(a.temps) > 0 {
		if err := m.remove(a.temps[0]); err != nil {
			return err
		}
		a.temps = a.temps[1:]
	}
	m.retry = nil
	return nil
}

// sweep removes the temporaries of a member that is gone and logs those that were published. It may be repeated.
func (m *Member) sweep(dir string) error {
	entries, err := m.fs.ReadDir(dir + "/t")
	if missing(err) {
		return nil
	} else if err != nil {
		return err
	}
	a := &attempt{}
	for _, e := range entries {
		name := dir + "/t/" + e.Name()
		info, err := m.fs.Stat(name)
		if missing(err) {
			continue
		} else if err != nil {
			return err
		}
		if info.Links > 1 {
			r, err := m.back.Identify(name, info)
			if err == nil {
				r.Op = Relayed
				a.records, a.temps = append(a.records, r), append(a.temps, name)
				continue
			}
			if !errors.Is(err, ErrDamaged) {
				return err
			}
			m.log.Warn("published temporary is damaged; scanning the root for its piece", "file", name, "error", err)
			m.ticket.Store(max(1, m.cfg.Unique()))
		}
		if err := m.remove(name); err != nil {
			return err
		}
	}
	if len(a.records) > 0 {
		for i := range a.records {
			m.back.Learn(&a.records[i])
		}
		if err := m.send(a); err != nil {
			return err
		}
	}
	return m.remove(dir + "/t")
}
