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
	name := m.cfg.member(m.life)
	dir := m.hosts() + "/" + name
	for _, d := range []string{m.hosts(), m.gone()} {
		if err := m.fs.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	for _, d := range []string{dir, dir + "/t"} {
		if err := m.fs.Mkdir(d, 0o700); err != nil { // never the first again, which the others may have given up meanwhile
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
	m.pending.begin(m.life)
	return nil
}

// member is the name of this host in an incarnation.
func (c *Config) member(life uint64) string { return c.Host + "." + strconv.FormatUint(life, 16) }

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

// Names of the two links that probeLinks makes among the temporaries.
const probe, probed = "probe", "probed"

// probeLinks fails with ErrLinks where the file system has no hard links.
func (t *tree) probeLinks(dir string) error {
	a, b := dir+"/t/"+probe, dir+"/t/"+probed
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

// fence ends an incarnation that the others have given up. Everything that rests on it is forgotten before the next one
// begins: credit, what was to be logged, proposals, and what the store knows.
func (m *Member) fence() {
	m.beatAt.Store(0)
	m.ticket.Store(0)
	for _, d := range m.pending.end() {
		m.Give(d.credit) // the evictor finds what was published; nobody has the file open
	}
	m.credits.reset(0)
	m.name, m.admitted, m.term, m.batches, m.retry = "", false, nil, nil, nil
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
	// The scan will find what was published so far, unless it is removed meanwhile. A log that is not read now would be
	// read from its beginning later, with what has long been evicted.
	if all, err := m.followAll(func(*Record) {}); err != nil || !all {
		return err
	}
	m.admitted = true
	m.beatAt.Store(int64(max(1, m.lastStep))) // this step's heartbeat
	m.ticket.Store(max(1, m.cfg.Unique()))
	m.log.Info("admitted to the shared root", "member", m.name, "epoch", epoch)
	j, err := m.seen.journal(&m.tree)
	if err != nil {
		return err
	}
	return m.apply(j)
}

// Leave ends this host's part: it writes the log of what it published and hands its directory to the others for
// removal. The caller must have ended all puts and leases.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush()
	if err == nil {
		err = m.retry.clear(m)
	}
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
