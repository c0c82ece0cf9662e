package shared

import (
	"errors"
	"maps"
	"slices"
	"strings"
)

// takeOver continues the work of earlier evictors. It empties their trash before anything is counted, and keeps their
// grants and journals. It may be repeated after an error.
func (t *term) takeOver(e epochs) error {
	for _, name := range e.old {
		old := t.m.base + "/" + name
		if err := t.emptyTrash(old); err != nil {
			return err
		}
		grants, err := t.m.list(old + "/grants")
		if err != nil {
			return err
		}
		for _, member := range grants {
			var g grantFile
			if strings.HasSuffix(member, ".new") {
				continue
			}
			p := t.peer(member, t.m.cfg.Now())
			if err := t.m.get(old+"/grants/"+member, &g); errors.Is(err, ErrDamaged) {
				if err := t.giveUp(member, p, err); err != nil {
					return err
				}
			} else if err != nil {
				return err
			}
			p.granted = max(p.granted, g.Granted)
		}
		j, err := t.m.readNames(old)
		if err != nil {
			return err
		}
		if err := t.takeJournal(old, j); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.peers)) {
		if err := t.writeGrant(name, t.peers[name]); err != nil {
			return err
		}
	}
	for _, name := range e.old {
		if err := t.m.removeAll(t.m.base + "/" + name); err != nil {
			return err
		}
	}
	return nil
}

// giveUp gives up a member whose credit is unknown. Once its temporaries are cleared and its log is read, it has none.
func (t *term) giveUp(name string, p *peer, cause error) error {
	t.m.log.Error("cannot read a host's grant; host given up, it will join again", "member", name, "error", cause)
	p.gone, p.unknown = true, true
	return ignoreMissing(t.m.fs.Rename(t.m.hosts()+"/"+name, t.m.gone()+"/"+name))
}

func (t *term) emptyTrash(dir string) error {
	names, err := t.m.list(dir + "/trash")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := t.m.remove(dir + "/trash/" + name); err != nil {
			return err
		}
		if err := t.heartbeat(0, false); err != nil {
			return err
		}
	}
	return nil
}

// takeJournal copies an earlier journal, so that acknowledgements stay valid. A batch that cannot be read is decided as
// spared, because nobody knows what was removed; every member then checks its files.
func (t *term) takeJournal(old string, j journal) error {
	for _, n := range slices.Sorted(maps.Keys(j.decided)) {
		t.seq = max(t.seq, n)
		var d decisionFile
		if err := t.m.get(decisionName(old, n), &d); errors.Is(err, ErrDamaged) {
			t.m.log.Error("cannot read a decision; its remaining victims are kept", "batch", n, "error", err)
			d = decisionFile{All: true}
		} else if err != nil {
			return err
		}
		if err := t.m.keep(decisionName(t.dir, n), d); err != nil {
			return err
		}
		p := t.batches[n]
		if p == nil {
			p = &proposal{}
			t.batches[n] = p
		}
		p.decided = true
	}
	for _, n := range slices.Sorted(maps.Keys(j.proposed)) {
		t.seq = max(t.seq, n)
		var f batchFile
		var b *batch
		err := t.m.get(proposalName(old, n), &f)
		if err == nil {
			b, err = f.batch()
		}
		if errors.Is(err, ErrDamaged) {
			t.m.log.Error("cannot read a batch of victims; the remaining ones are kept", "batch", n, "error", err)
			f, b = batchFile{}, &batch{}
			if !j.decided[n] {
				if err := t.m.keep(decisionName(t.dir, n), decisionFile{All: true}); err != nil {
					return err
				}
				t.batches[n] = &proposal{decided: true}
			}
		} else if err != nil {
			return err
		}
		if err := t.m.keep(proposalName(t.dir, n), f); err != nil {
			return err
		}
		p := t.batches[n]
		if p == nil {
			p = &proposal{}
			t.batches[n] = p
		}
		p.batch, p.written = *b, true
	}
	return nil
}
