package shared

import (
	"errors"
	"strings"
)

// takeOver goes on where earlier evictors ended: their trash is emptied before anything else is reckoned, their grants hold,
// and so do their journals. It can be begun again.
func (m *Member) takeOver(e epochs) error {
	r := m.reign
	for _, name := range e.old {
		old := m.base + "/" + name
		if err := m.emptyTrash(old); err != nil {
			return err
		}
		grants, err := m.list(old + "/grants")
		if err != nil {
			return err
		}
		for _, member := range grants {
			var g grantFile
			if strings.HasSuffix(member, ".new") {
				continue
			}
			p := r.peer(member, m.cfg.Now())
			if err := m.get(old+"/grants/"+member, &g); errors.Is(err, ErrDamaged) {
				if err := m.giveUp(member, p, err); err != nil {
					return err
				}
			} else if err != nil {
				return err
			}
			p.granted = max(p.granted, g.Granted)
		}
		j, err := m.readNames(old)
		if err != nil {
			return err
		}
		if err := m.takeJournal(old, j); err != nil {
			return err
		}
	}
	for name, p := range r.peers {
		if err := m.tellGrant(name, p); err != nil {
			return err
		}
	}
	for _, name := range e.old {
		if err := m.removeAll(m.base + "/" + name); err != nil {
			return err
		}
	}
	return nil
}

// giveUp ends a member whose credit nobody knows any more: once its temporaries are cleared and its log is read, it has none.
func (m *Member) giveUp(name string, p *peer, cause error) error {
	m.log.Error("what credit a host has cannot be read; it is given up and joins again", "member", name, "error", cause)
	p.gone, p.unknown = true, true
	return ignoreMissing(m.fs.Rename(m.hosts()+"/"+name, m.gone()+"/"+name))
}

func (m *Member) emptyTrash(dir string) error {
	names, err := m.list(dir + "/trash")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := m.remove(dir + "/trash/" + name); err != nil {
			return err
		}
		if err := m.pulse(0, false); err != nil {
			return err
		}
	}
	return nil
}

// takeJournal copies an earlier journal, so that acknowledgements hold. Of a batch that cannot be read nobody can tell what
// was removed: it is decided as one that was spared, which makes everybody look.
func (m *Member) takeJournal(old string, j journal) error {
	r := m.reign
	for n := range j.decided {
		r.seq = max(r.seq, n)
		var d decisionFile
		if err := m.get(decisionName(old, n), &d); errors.Is(err, ErrDamaged) {
			m.log.Error("a decision cannot be read; what is left of its victims is kept", "batch", n, "error", err)
			d = decisionFile{All: true}
		} else if err != nil {
			return err
		}
		if err := m.keep(decisionName(r.dir, n), d); err != nil {
			return err
		}
		p := r.batches[n]
		if p == nil {
			p = &proposal{}
			r.batches[n] = p
		}
		p.decided = true
	}
	for n := range j.proposed {
		r.seq = max(r.seq, n)
		var f batchFile
		var b *batch
		err := m.get(proposalName(old, n), &f)
		if err == nil {
			b, err = f.batch()
		}
		if errors.Is(err, ErrDamaged) {
			m.log.Error("a batch of victims cannot be read; what is left of them is kept", "batch", n, "error", err)
			f, b = batchFile{}, &batch{}
			if !j.decided[n] {
				if err := m.keep(decisionName(r.dir, n), decisionFile{All: true}); err != nil {
					return err
				}
				r.batches[n] = &proposal{decided: true}
			}
		} else if err != nil {
			return err
		}
		if err := m.keep(proposalName(r.dir, n), f); err != nil {
			return err
		}
		p := r.batches[n]
		if p == nil {
			p = &proposal{}
			r.batches[n] = p
		}
		p.batch, p.written = *b, true
	}
	return nil
}
