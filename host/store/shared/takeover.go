package shared

import "strings"

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
			if err := m.get(old+"/grants/"+member, &g); err != nil {
				return err
			}
			p := r.peer(member, m.cfg.Now())
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

// takeJournal copies an earlier journal, so that acknowledgements hold.
func (m *Member) takeJournal(old string, j journal) error {
	r := m.reign
	for n := range j.decided {
		r.seq = max(r.seq, n)
		var d decisionFile
		if err := m.get(decisionName(old, n), &d); err != nil {
			return err
		}
		if err := m.put(decisionName(r.dir, n), d); err != nil {
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
		if err := m.get(proposalName(old, n), &f); err != nil {
			return err
		}
		b, err := f.batch()
		if err != nil {
			return err
		}
		if err := m.put(proposalName(r.dir, n), f); err != nil {
			return err
		}
		p := r.batches[n]
		if p == nil {
			p = &proposal{}
			r.batches[n] = p
		}
		p.batch = *b
	}
	return nil
}
