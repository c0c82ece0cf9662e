package shared

import (
	"errors"
	"os"
)

// sweep removes the temporaries of a member that is gone and logs those that were published. It may be repeated. A
// temporary is emptied first: its writer may be paused for long and have it open, and has credit for it no more.
func (t *term) sweep(dir string) error {
	m := t.m
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
		if base := e.Name(); info.Links > 1 && base != probe && base != probed {
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
			m.scanAgain()
			if err := m.remove(name); err != nil {
				return err
			}
		} else if linked, err := m.unlink(name, os.O_TRUNC); err != nil {
			return err
		} else if linked {
			m.log.Warn("temporary was published while it was removed; scanning the root for its piece", "file", name)
			m.scanAgain()
		}
	}
	if len(a.records) > 0 {
		for i := range a.records {
			m.learn(&a.records[i])
		}
		if err := a.record(m); err != nil {
			return err
		}
		if err := a.clear(m); err != nil {
			return err
		}
	}
	return m.remove(dir + "/t")
}

// scanAgain asks for another scan of the root.
func (m *Member) scanAgain() { m.ticket.Store(max(1, m.cfg.Unique())) }
