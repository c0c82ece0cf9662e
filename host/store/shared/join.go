package shared

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// join creates the directory of a new incarnation.
func (m *Member) join() error {
	m.life = max(1, m.cfg.Unique())
	name := m.cfg.Host + "." + strconv.FormatUint(m.life, 16)
	dir := m.hosts() + "/" + name
	for _, d := range []string{m.hosts(), m.gone(), dir, dir + "/t"} {
		if err := m.fs.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	if err := m.probeLinks(dir); err != nil {
		return err
	}
	m.name, m.dir, m.admitted = name, dir, false
	if err := m.giveUpEarlier(); err != nil {
		return err
	}
	m.incarnation = incarnation{
		name: name, dir: dir, life: m.life, status: status{Vetoes: map[uint64][]int{}}, batches: map[uint64]*batch{},
		tails: map[string]*tail{}, forced: map[ID]Victim{}, reported: map[ID]bool{},
	}
	m.term = nil
	m.credits.reset(m.life)
	m.pending.reset(m.life)
	return nil
}

// giveUpEarlier gives up this host's earlier incarnations at once. The operator makes sure that no two running hosts
// have the same id.
func (m *Member) giveUpEarlier() error {
	names, err := m.list(m.hosts())
	if err != nil {
		return err
	}
	for _, name := range names {
		if name != m.name && m.isOwn(name) {
			if err := ignoreMissing(m.fs.Rename(m.hosts()+"/"+name, m.gone()+"/"+name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Member) isOwn(member string) bool {
	host, _, _ := strings.Cut(member, ".")
	return host == m.cfg.Host
}

// probeLinks fails with ErrLinks where the file system has no hard links.
func (t *tree) probeLinks(dir string) error {
	a, b := dir+"/t/probe", dir+"/t/probed"
	if err := t.put(a, status{}); err != nil {
		return err
	}
	err := t.fs.Link(a, b)
	switch {
	case err == nil:
		err = t.remove(b)
	case !missing(err):
		err = fmt.Errorf("%w: %w", ErrLinks, err)
	}
	return errors.Join(err, t.remove(a))
}

// fence ends an incarnation that the others have given up.
func (m *Member) fence() {
	m.beatAt.Store(0)
	m.ticket.Store(0)
	m.credits.reset(0)
	m.pending.reset(0)
	for _, b := range m.batches {
		b.decide(m.back, func(int) bool { return false }) // their fate is unknown: the scan finds out
	}
	m.name, m.admitted, m.term, m.batches = "", false, nil, nil
	m.back.Fenced()
}

// readGrant reads this member's credit. The first grant admits this host: from then on the evictor waits for its
// acknowledgements, so the host notes where the other logs end and then scans.
func (m *Member) readGrant(epoch uint64) error {
	if epoch == 0 {
		return nil
	}
	var g grantFile
	switch err := m.get(m.epochDir(epoch)+"/grants/"+m.name, &g); {
	case missing(err):
		return nil
	case errors.Is(err, ErrDamaged):
		m.log.Warn("cannot read a grant", "error", err)
		return nil
	case err != nil:
		return err
	}
	m.credits.grant(g.Granted)
	if m.admitted {
		return nil
	}
	// The scan will find what was published so far, unless it is removed meanwhile.
	if err := m.followAll(func(*Record) {}); err != nil {
		return err
	}
	m.admitted = true
	m.beatAt.Store(int64(max(1, m.lastStep))) // this step's heartbeat
	m.ticket.Store(max(1, m.cfg.Unique()))
	m.log.Info("admitted to the shared root", "member", m.name, "epoch", epoch)
	return m.readJournal(epoch)
}

// Leave ends this host's part: it writes the log of what it published and hands its directory to the others for
// removal. The caller must have ended all puts and leases.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush()
	m.beatAt.Store(0)
	err = errors.Join(err, ignoreMissing(m.fs.Rename(m.dir, m.gone()+"/"+m.name)))
	if m.term != nil {
		err = errors.Join(err, ignoreMissing(m.fs.Rename(m.term.dir, fmt.Sprintf("%s/x%d.%s", m.base, m.term.epoch, m.name))))
		m.term = nil
	}
	m.name, m.admitted = "", false
	m.ticket.Store(0)
	m.credits.reset(0)
	m.publishStats()
	return err
}
