package shared

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// join makes this incarnation's directory.
func (m *Member) join() error {
	m.life = max(1, m.cfg.Unique())
	name := m.cfg.Host + "." + strconv.FormatUint(m.life, 16)
	dir := m.hosts() + "/" + name
	for _, d := range []string{m.hosts(), m.gone(), dir, dir + "/t"} {
		if err := m.fs.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	if err := m.probe(dir); err != nil {
		return err
	}
	m.name, m.dir, m.admitted = name, dir, false
	if err := m.buryEarlier(); err != nil {
		return err
	}
	m.status = status{Vetoes: map[uint64][]int{}}
	m.batches, m.tails = map[uint64]*batch{}, map[string]*tail{}
	m.forced, m.reported = map[ID]Victim{}, map[ID]bool{}
	m.out, m.again, m.reign = writer{}, nil, nil
	m.credits.reset(m.life)
	m.pending.reset(m.life)
	return nil
}

// buryEarlier gives this host's earlier incarnations up at once: whoever starts a host sees to it that no other one of the
// same id runs.
func (m *Member) buryEarlier() error {
	names, err := m.list(m.hosts())
	if err != nil {
		return err
	}
	for _, name := range names {
		if name != m.name && m.mine(name) {
			if err := ignoreMissing(m.fs.Rename(m.hosts()+"/"+name, m.gone()+"/"+name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Member) mine(member string) bool {
	host, _, _ := strings.Cut(member, ".")
	return host == m.cfg.Host
}

// probe sees that the file system has hard links.
func (m *Member) probe(dir string) error {
	a, b := dir+"/t/probe", dir+"/t/probed"
	if err := m.put(a, status{}); err != nil {
		return err
	}
	err := m.fs.Link(a, b)
	switch {
	case err == nil:
		err = m.remove(b)
	case !missing(err):
		err = fmt.Errorf("%w: %w", ErrLinks, err)
	}
	return errors.Join(err, m.remove(a))
}

// forget ends an incarnation that the others have given up.
func (m *Member) forget() {
	m.beatAt.Store(0)
	m.ticket.Store(0)
	m.credits.reset(0)
	m.pending.reset(0)
	for _, b := range m.batches {
		b.decide(m.back, func(int) bool { return false }) // whatever became of them: the scan will tell
	}
	m.name, m.admitted, m.reign, m.batches = "", false, nil, nil
	m.back.Fenced()
}

// readGrant sees what credit there is. The first one admits this host: from then on the evictor waits for its
// acknowledgements, so now is the time to take note of where the others' logs end, and then to scan.
func (m *Member) readGrant(epoch uint64) error {
	if epoch == 0 {
		return nil
	}
	var g grantFile
	switch err := m.get(m.epochDir(epoch)+"/grants/"+m.name, &g); {
	case missing(err):
		return nil
	case errors.Is(err, ErrDamaged):
		m.log.Warn("a grant cannot be read", "error", err)
		return nil
	case err != nil:
		return err
	}
	m.credits.grant(g.Granted)
	if m.admitted {
		return nil
	}
	// What was published up to now the scan will find, unless it has been removed since.
	if err := m.followAll(func(*Record) {}); err != nil {
		return err
	}
	m.admitted = true
	m.beatAt.Store(int64(max(1, m.lastStep))) // this step's heartbeat
	m.ticket.Store(max(1, m.cfg.Unique()))
	m.log.Info("admitted to the shared root", "member", m.name, "epoch", epoch)
	return m.readJournal(epoch)
}

// Leave ends this host's part: what it has published is told, and its directory goes to the others to be cleared. Puts and
// leases that are still out are the caller's bug.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush()
	m.beatAt.Store(0)
	err = errors.Join(err, ignoreMissing(m.fs.Rename(m.dir, m.gone()+"/"+m.name)))
	if m.reign != nil {
		err = errors.Join(err, ignoreMissing(m.fs.Rename(m.reign.dir, fmt.Sprintf("%s/x%d.%s", m.base, m.reign.epoch, m.name))))
		m.reign = nil
	}
	m.name, m.admitted = "", false
	m.ticket.Store(0)
	m.credits.reset(0)
	m.tell()
	return err
}
