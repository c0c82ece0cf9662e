package shared

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// epochs lists the evictors' directories.
type epochs struct {
	top     uint64   // the highest e<n>; 0: none
	highest uint64   // number ever used
	lower   []uint64 // other e<n>
	old     []string // names of x<n>.<member>
	begun   []string // members that have a c.<member>
}

// readEpochs finds the evictor and notes changes of its heartbeat.
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
		n, err := strconv.ParseUint(number, 10, 64)
		switch {
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

// resetTimers restarts the silence timers after this host was paused: it may have missed heartbeats.
func (m *Member) resetTimers(now time.Duration) {
	m.seen.beatAt = now
	if m.term != nil {
		for _, p := range m.term.peers {
			p.seenAt = now
		}
	}
}

// campaign makes this host the evictor when there is no live one.
func (m *Member) campaign(now time.Duration, e epochs) error {
	if e.top != 0 {
		if now-m.seen.beatAt <= m.cfg.Lapse && !(m.isOwn(m.seen.beat.Owner) && m.seen.beat.Owner != m.name) {
			if slices.Contains(e.begun, m.name) { // an attempt that failed half way, and another host was elected
				return m.removeAll(m.base + "/c." + m.name)
			}
			return nil
		}
		if m.shouldWait(now, m.seen.beatAt+m.cfg.Lapse) {
			return nil
		}
		to := fmt.Sprintf("%s/x%d.%s", m.base, e.top, m.name)
		if err := m.fs.Rename(m.epochDir(e.top), to); err != nil {
			return ignoreMissing(err) // another host was first
		}
		m.log.Warn("evictor given up", "epoch", e.top, "member", m.seen.beat.Owner)
	} else if m.shouldWait(now, m.seen.vacant) {
		return nil
	}
	// this host may have been given up meanwhile, and its candidate directory removed
	return ignoreMissing(m.takeEpoch(e.highest + 1))
}

// shouldWait reports whether other hosts should campaign first: those that know all pieces can grant credit without a
// scan.
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
			return m.removeAll(mine) // another host was first
		}
	}
	// Other hosts may have used higher numbers while this host was paused.
	names, err := m.list(m.base)
	if err != nil {
		return err
	}
	for _, name := range names {
		number, _, _ := strings.Cut(name[1:], ".")
		k, err := strconv.ParseUint(number, 10, 64)
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
