package shared

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// epochBits is the number of bits of an epoch. The numbers of its batches have the epoch in the bits above the low 32.
const epochBits = 31

// epochs lists the directories of the evictors.
type epochs struct {
	top     uint64   // highest e<n>; 0 if none
	highest uint64   // highest number ever used
	lower   []uint64 // the other e<n>
	old     []string // names of the x<n>.<member>
	begun   []string // members that have a c.<member>
}

// readEpochs finds the current evictor and notes changes of its heartbeat.
func (m *Member) readEpochs(now time.Duration) (epochs, error) {
	var e epochs
	names, err := m.list(m.base)
	if err != nil {
		return e, err
	}
	for _, name := range names {
		if member, ok := strings.CutPrefix(name, "c."); ok {
			e.begun = append(e.begun, member)
			continue
		}
		number, _, _ := strings.Cut(name[1:], ".")
		n, err := strconv.ParseUint(number, 10, epochBits)
		switch {
		case errors.Is(err, strconv.ErrRange):
			m.log.Warn("a directory has the number of no epoch; it is left alone", "directory", name)
			continue
		case err != nil:
			continue
		case name[0] == 'e' && name == "e"+number:
			if n > e.top {
				n, e.top = e.top, n
			}
			if n > 0 {
				e.lower = append(e.lower, n)
			}
			e.highest = max(e.highest, e.top)
		case name[0] == 'x':
			e.old = append(e.old, name)
			e.highest = max(e.highest, n)
		}
	}
	if r := m.term; r != nil && r.epoch < e.top {
		m.log.Warn("another host is the evictor now", "epoch", e.top)
		m.term = nil
	}
	if e.top == 0 {
		if m.seen.epoch != 0 || m.seen.vacant == 0 {
			m.seen.vacant = max(1, now)
		}
		m.seen.epoch, m.seen.beat = 0, beat{}
		return e, nil
	}
	var b beat
	if err := m.get(m.epochDir(e.top)+"/beat", &b); err != nil && !missing(err) {
		m.log.Warn("cannot read the evictor's heartbeat", "error", err)
	}
	if e.top != m.seen.epoch || b != m.seen.beat {
		m.seen.epoch, m.seen.beat, m.seen.beatAt = e.top, b, now
	}
	m.seen.vacant = 0
	return e, nil
}

// resetTimers restarts the silence timers after a pause of this host, which may have missed heartbeats.
func (m *Member) resetTimers(now time.Duration) {
	m.seen.beatAt = now
	if m.term != nil {
		for _, p := range m.term.peers {
			p.seenAt = now
		}
	}
}

// campaign makes this host the evictor if there is no live one.
func (m *Member) campaign(now time.Duration, e epochs) error {
	if e.top != 0 {
		if now-m.seen.beatAt <= m.cfg.Lapse && !(m.isOwn(m.seen.beat.Owner) && m.seen.beat.Owner != m.name) {
			if slices.Contains(e.begun, m.name) { // An earlier attempt failed half way, and another host was elected.
				return m.removeAll(m.base + "/c." + m.name)
			}
			return nil
		}
		if m.shouldWait(now, m.seen.beatAt+m.cfg.Lapse) {
			return nil
		}
		to := fmt.Sprintf("%s/x%d.%s", m.base, e.top, m.name)
		if err := m.fs.Rename(m.epochDir(e.top), to); err != nil {
			return ignoreMissing(err) // another host was elected
		}
		m.log.Warn("evictor given up", "epoch", e.top, "member", m.seen.beat.Owner)
	} else if m.shouldWait(now, m.seen.vacant) {
		return nil
	}
	// This host may have been expelled since, and its candidate directory removed.
	return ignoreMissing(m.takeEpoch(e.highest + 1))
}

// shouldWait reports whether this host should let others campaign first: hosts that have scanned the root can grant credit
// without a scan.
func (m *Member) shouldWait(now, since time.Duration) bool {
	if m.active() || now-since > 2*m.cfg.Lapse {
		return false
	}
	names, err := m.list(m.hosts())
	for _, name := range names {
		if name != m.name && !m.isOwn(name) {
			return true
		}
	}
	return err != nil
}

// takeEpoch renames a prepared directory to e<n>, unless that exists.
func (m *Member) takeEpoch(n uint64) error {
	mine, dir := m.base+"/c."+m.name, m.epochDir(n)
	if err := m.removeAll(mine); err != nil {
		return err
	}
	for _, d := range []string{"", "/grants", "/journal", "/trash"} {
		if err := m.fs.MkdirAll(mine+d, 0o700); err != nil {
			return err
		}
	}
	b := beat{Owner: m.name}
	if err := m.put(mine+"/beat", b); err != nil {
		return err
	}
	if err := m.fs.Rename(mine, dir); err != nil {
		var have beat
		if gerr := m.get(dir+"/beat", &have); gerr != nil || have.Owner != m.name {
			return m.removeAll(mine) // another host was elected
		}
	}
	// Other hosts may have used higher numbers while this host was paused.
	names, err := m.list(m.base)
	if err != nil {
		return err
	}
	for _, name := range names {
		number, _, _ := strings.Cut(name[1:], ".")
		k, err := strconv.ParseUint(number, 10, epochBits)
		if err != nil || name[0] != 'e' && name[0] != 'x' {
			continue
		}
		switch {
		case k > n, k == n && name[0] == 'x':
			return ignoreMissing(m.fs.Rename(dir, fmt.Sprintf("%s/x%d.%s", m.base, n, m.name)))
		case name[0] == 'e' && k < n: // left by another paused host
			if err := ignoreMissing(m.fs.Rename(m.epochDir(k), fmt.Sprintf("%s/x%d.%s", m.base, k, m.name))); err != nil {
				return err
			}
		}
	}
	m.log.Info("elected evictor of the shared root", "epoch", n)
	m.term = &term{
		m: m, epoch: n, dir: dir, seq: n << 32, peers: map[string]*peer{}, batches: map[uint64]*proposal{}, beat: b,
	}
	m.seen.epoch, m.seen.beat = n, b
	m.Wake()
	return nil
}

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
		if err := m.fs.Mkdir(d, 0o700); err != nil { // The directory of an earlier join is never used again, since the others may have expelled it.
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
		name: name, dir: dir, life: m.life, tails: map[string]*tail{},
	}
	m.Docket.Begin(m.back)
	m.term = nil
	m.Reset(m.life)
	m.pending.Begin(m.life)
	return nil
}

// member returns the name of this host in an incarnation.
func (c *Config) member(life uint64) string { return c.Host + "." + strconv.FormatUint(life, 16) }

// giveUpEarlier expels earlier incarnations of this host at once. The operator must make sure that no two running hosts have
// the same id.
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

// probe and probed are the names of the two links that probeLinks makes among the temporaries.
const probe, probed = "probe", "probed"

// probeLinks returns ErrLinks if the file system has no hard links.
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

// fence ends an incarnation that was expelled. It discards all state that depends on it: credit, records that are not logged,
// proposals, and the store's index.
func (m *Member) fence() {
	m.Silence()
	for _, d := range m.pending.end() {
		m.Give(d.credit) // The evictor finds published pieces, and no host has the file open.
	}
	m.Reset(0)
	m.name, m.admitted, m.term, m.retry = "", false, nil, nil
	m.Docket.Begin(m.back)
	m.back.Fenced()
}

// readGrant reads this member's credit. The first grant admits this host: the evictor now waits for its acknowledgements, so
// the host notes where the other logs end and then scans.
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
	m.Grant(g.Granted)
	if m.admitted {
		return nil
	}
	// Logs are followed from their current end. The scan finds the pieces that were published before and still exist. A log
	// that cannot be read now would later be read from its beginning, with records of entries that were evicted long ago.
	if all, err := m.followAll(func(*Record) {}); err != nil || !all {
		return err
	}
	m.admitted = true
	m.Beat(m.lastStep) // the time of this step's heartbeat
	m.ScanAgain()
	m.log.Info("admitted to the shared root", "member", m.name, "epoch", epoch)
	j, err := m.seen.journal(&m.tree)
	if err != nil {
		return err
	}
	return m.apply(j)
}

// Leave ends this host's membership: it writes its log and moves its directory to gone, where the others remove it. All puts
// and leases must have ended.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush()
	if err == nil {
		err = m.retry.clear(m)
	}
	m.Silence()
	err = errors.Join(err, ignoreMissing(m.fs.Rename(m.dir, m.gone()+"/"+m.name)))
	if m.term != nil {
		err = errors.Join(err, ignoreMissing(m.fs.Rename(m.term.dir, fmt.Sprintf("%s/x%d.%s", m.base, m.term.epoch, m.name))))
		m.term = nil
	}
	m.name, m.admitted = "", false
	m.Reset(0)
	m.publishStats()
	return err
}
