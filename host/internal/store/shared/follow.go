package shared

import (
	"errors"
	"slices"
)

// followAll reads the logs of all other members, including those that are gone. all is false when it missed one that
// was renamed meanwhile.
func (m *Member) followAll(each func(r *Record)) (all bool, err error) {
	live, err := m.list(m.hosts())
	if err != nil {
		return false, err
	}
	dead, err := m.list(m.gone())
	if err != nil {
		return false, err
	}
	all = true
	seen := map[string]bool{}
	for i, name := range slices.Concat(live, dead) {
		if name == m.name || seen[name] {
			continue
		}
		seen[name] = true
		dir := m.hosts() + "/" + name
		if i >= len(live) {
			dir = m.gone() + "/" + name
		}
		t := m.tails[name]
		if t == nil {
			t = &tail{}
			m.tails[name] = t
		}
		err := t.follow(&m.tree, dir, each)
		switch {
		case missing(err): // it was renamed or removed
			all = false
		case errors.Is(err, ErrDamaged):
			m.log.Warn("cannot read a log", "error", err)
		case err != nil:
			return false, err
		default:
			t.ended = i >= len(live)
		}
		if t.lost {
			t.lost = false
			if m.admitted {
				m.log.Warn("log rotated before it was read; scanning the root again", "log", name)
				m.scanAgain()
			}
		}
	}
	for name := range m.tails {
		if !seen[name] {
			delete(m.tails, name)
		}
	}
	return all, nil
}

func (m *Member) learn(r *Record) {
	switch r.Op {
	case Published, Relayed:
		if !m.back.Learn(r) {
			m.later = append(m.later, *r)
		}
	case Touched:
		m.back.Touched(r.Fingerprints)
	case Damaged:
		m.noteDamaged(r)
	}
}

// noteDamaged remembers a damaged entry; the evictor, now or later, puts it into the journal.
func (m *Member) noteDamaged(r *Record) {
	if !m.reported[r.ID()] && len(m.forced) < maxForced {
		m.forced[r.ID()] = Victim{
			Namespace: r.Namespace, Group: r.Group, Key: r.Key, Pieces: r.Pieces, Names: r.Names, Bytes: r.Bytes,
		}
	}
}

const maxForced = 1 << 16
