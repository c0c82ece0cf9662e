package bucket

import (
	"bytes"
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// maxBatch is the maximum number of victims in a batch.
const maxBatch = 1024

// term is the state and the work of the elected evictor.
type term struct {
	m       *Member
	number  uint64
	next    evictor // content of the evictor's object at the next write
	wroteAt time.Duration
	last    uint64 // number of the last batch made
	members map[string]*gone
	batches map[uint64]*proposal
	cleaned bool   // set once leftovers of earlier terms are removed
	ticket  uint64 // ticket of this host's scan when the term began
	knows   bool   // set once everything that was stored before the term began is counted
	outside int64

	counted          bool
	removed, givenUp uint64
}

// gone is a member that has left or was declared dead.
type gone struct {
	since time.Duration // when the end of its log was recorded
	swept bool          // set once all objects that it stored are counted
}

// proposal is a batch that is being decided.
type proposal struct {
	victims []shared.Victim
	done    int // number of victims removed or spared so far
	spared  map[int]bool
}

// campaign makes this host the evictor if there is no live one. Hosts that have scanned the bucket take precedence, since they
// can grant credit without a scan.
func (m *Member) campaign(now time.Duration) error {
	next := evictor{}
	if o := m.evictor; o != nil {
		silent := now-m.seenAt > m.cfg.Lapse
		if o.Owner != "" && !silent && !m.isOwn(o.Owner) {
			return nil
		}
		next = o.clone()
	}
	for name, p := range m.peers {
		if name != m.name && p.here && p.Scanned && !m.active() && now-m.seenAt <= 3*m.cfg.Lapse {
			return nil
		}
	}
	next.Term++
	next.Beat++
	next.Owner = m.name
	b, err := shared.EncodeControl(&next)
	if err != nil {
		return err
	}
	version, err := m.cfg.Objects.Put("evictor", b, m.version)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
		return nil // another host was elected
	} else if err != nil {
		return err
	}
	m.evictor, m.version, m.seenAt = &next, version, now
	m.begin()
	return nil
}

// begin starts this host's term as the evictor's object describes it.
func (m *Member) begin() {
	o := m.evictor
	m.log.Info("elected evictor of the shared bucket", "term", o.Term)
	m.term = &term{
		m: m, number: o.Term, next: o.clone(), wroteAt: m.lastStep, last: o.Term << 32, ticket: m.Ticket(),
		members: map[string]*gone{}, batches: map[uint64]*proposal{},
	}
	m.mu.Lock()
	m.audit = audit{}
	m.mu.Unlock()
	m.Wake()
}

// clone returns a deep copy.
func (o *evictor) clone() evictor {
	c := *o
	c.Grants, c.Batches = map[string]*grant{}, map[uint64]*batch{}
	for name, s := range o.Grants {
		s := *s
		c.Grants[name] = &s
	}
	for n, b := range o.Batches {
		b := *b
		c.Batches[n] = &b
	}
	return c
}

// step makes one round of the evictor's work. Changes of grants and batches take effect when the evictor's object is written at
// the end.
func (t *term) step(now time.Duration) error {
	var failed []error
	failed = append(failed, t.clean(), t.admit(now), t.removeGone(now), t.sweep())
	if t.holds() {
		failed = append(failed, t.decideAll())
	}
	failed = append(failed, t.balance(), t.write())
	return errors.Join(failed...)
}

// holds reports whether no other host can have been elected yet.
func (t *term) holds() bool { return t.m.cfg.Now()-t.wroteAt < t.m.cfg.Lapse/2 && t.m.Fresh() }

// admit gives grants to members that have joined, and records the end of the log of members that are silent or gone.
func (t *term) admit(now time.Duration) error {
	m := t.m
	for name, p := range m.peers {
		if p.here && t.next.Grants[name] == nil {
			t.next.Grants[name] = &grant{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.next.Grants)) {
		s, p := t.next.Grants[name], m.peers[name]
		if name == m.name || s.End > 0 {
			continue
		}
		if p == nil { // The member joined and left before this host saw it.
			p = &peer{next: 1}
			m.peers[name] = p
		}
		if p.here && now-p.seenAt <= m.cfg.Lapse {
			continue
		}
		if p.here {
			m.log.Warn("host given up", "member", name, "silent", now-p.seenAt)
			t.givenUp++
		}
		if err := t.endLog(name, s, now); err != nil {
			return err
		}
	}
	return nil
}

// endLog records where the log of a member that is gone ends. No host reads what the member logs after that.
func (t *term) endLog(name string, s *grant, now time.Duration) error {
	m := t.m
	list, err := m.cfg.Objects.List("log/" + name)
	if err != nil {
		return err
	}
	last := m.peers[name].next - 1
	for text := range list {
		if n, err := strconv.ParseUint(text, 10, 64); err == nil && n <= mostLogs {
			last = max(last, n)
		}
	}
	s.End = last + 1
	clean, err := t.leftCleanly(name, last)
	if clean {
		s.End = last
	}
	t.members[name] = &gone{since: now, swept: clean}
	return err
}

// leftCleanly reports whether log object n of the member is the end mark.
func (t *term) leftCleanly(name string, n uint64) (bool, error) {
	b, _, err := t.m.cfg.Objects.Get(logName(name, n), "")
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return bytes.Equal(b, end), err
}

// over reports whether the evictor's object, as the others can read it, says that the member is gone.
func (t *term) over(name string) bool {
	s := t.m.evictor.Grants[name]
	return s != nil && s.End > 0
}

// removeGone removes the objects of members that are gone. Once an audit has counted what such a member stored, it proposes a
// batch that forgets the member.
func (t *term) removeGone(now time.Duration) error {
	m := t.m
	for _, name := range slices.Sorted(maps.Keys(t.next.Grants)) {
		if !t.over(name) {
			continue
		}
		if m.peers[name] != nil && m.peers[name].here {
			if err := m.cfg.Objects.Remove("hosts/" + name); err != nil {
				return err
			}
		}
		g := t.members[name]
		if g == nil { // An earlier evictor recorded the end of the log.
			clean, err := t.leftCleanly(name, t.next.Grants[name].End)
			if err != nil {
				return err
			}
			g = &gone{since: now, swept: clean}
			t.members[name] = g
		}
		forgotten := false
		for _, b := range t.next.Batches {
			forgotten = forgotten || b.Forget == name
		}
		if g.swept && !forgotten {
			t.last++
			t.next.Batches[t.last] = &batch{Forget: name}
		}
	}
	return nil
}

// clean removes batches that earlier evictors stored but did not enter in the evictor's object, and logs that members wrote
// after they were forgotten.
func (t *term) clean() error {
	if t.cleaned {
		return nil
	}
	batches, err := t.m.cfg.Objects.List("batch")
	if err != nil {
		return err
	}
	for text := range batches {
		if n, err := strconv.ParseUint(text, 10, 64); err != nil || t.next.Batches[n] != nil {
			continue // It may be a batch that others know.
		}
		if err := t.m.cfg.Objects.Remove("batch/" + text); err != nil {
			return err
		}
	}
	logs, err := t.m.cfg.Objects.List("log")
	if err != nil {
		return err
	}
	for name := range logs {
		if t.next.Grants[name] == nil { // A member without a grant does not log.
			if err := t.forget(name); err != nil {
				return err
			}
		}
	}
	t.cleaned = true
	return nil
}

// forget removes the log and the grant of a member. All others must have read its log.
func (t *term) forget(name string) error {
	list, err := t.m.cfg.Objects.List("log/" + name)
	if err != nil {
		return err
	}
	for text := range list {
		if err := t.m.cfg.Objects.Remove("log/" + name + "/" + text); err != nil {
			return err
		}
	}
	delete(t.next.Grants, name)
	delete(t.members, name)
	return nil
}

// acks returns the vetoes of all live members. all is set if each of them has acknowledged the batch, any if at least one has.
func (t *term) acks(n uint64) (vetoes map[int]bool, all, any bool) {
	vetoes, all = map[int]bool{}, true
	for name := range t.next.Grants {
		if t.over(name) {
			continue
		}
		told := t.m.told.Vetoes
		if name != t.m.name {
			told = nil
			if p := t.m.peers[name]; p != nil {
				told = p.Vetoes
			}
		}
		list, acked := told[n]
		all, any = all && acked, any || acked
		for _, i := range list {
			vetoes[i] = true
		}
	}
	return vetoes, all, any
}

// decideAll decides the batches that every member has acknowledged, and removes the batches that every member has applied.
func (t *term) decideAll() error {
	for _, n := range slices.Sorted(maps.Keys(t.next.Batches)) {
		b := t.next.Batches[n]
		known := t.m.evictor.Batches[n]
		if known == nil {
			continue // The others do not see it yet.
		}
		vetoes, all, any := t.acks(n)
		_, mine := t.m.Batches[n]
		switch {
		case known.Decided && !any && !mine:
			err := error(nil)
			if b.Forget != "" {
				err = t.forget(b.Forget)
			} else {
				err = t.m.cfg.Objects.Remove(batchName(n))
			}
			if err != nil {
				return err
			}
			delete(t.next.Batches, n)
		case !b.Decided && t.m.unread[n] > mostBad: // It is unknown which victims an earlier evictor removed. So all count as spared, and every member checks them.
			b.Decided, b.All = true, true
		case !b.Decided && all && b.Forget != "":
			b.Decided = true
		case !b.Decided && all:
			if over, err := t.judge(n, b, vetoes); err != nil || !over {
				return err
			}
		}
	}
	return nil
}

// removals is the number of victims removed between two checks of the clock.
const removals = 64

// judge removes the victims of a batch except the spared ones. If that takes too long it returns with over unset and continues
// at the next step, so that heartbeats are not delayed.
func (t *term) judge(n uint64, b *batch, vetoes map[int]bool) (over bool, err error) {
	m := t.m
	p := t.batches[n]
	if p == nil {
		p = &proposal{spared: map[int]bool{}, victims: m.Batches[n]}
		t.batches[n] = p
	}
	maps.Copy(p.spared, vetoes)
	for began := m.cfg.Now(); p.done < len(p.victims); {
		if !t.holds() || m.cfg.Now()-began > m.cfg.Lapse/8 {
			m.Wake()
			return false, nil
		}
		end := min(p.done+removals, len(p.victims))
		var paths []string
		for i := p.done; i < end; i++ {
			if p.spared[i] {
				continue
			}
			list, unnamed := m.back.Paths(&p.victims[i])
			if unnamed != nil {
				m.log.Warn("victim spared: its objects cannot be named", "key", p.victims[i].Key, "error", unnamed)
				p.spared[i] = true
				continue
			}
			paths = append(paths, list...)
		}
		if err := t.remove(paths); err != nil {
			return false, err
		}
		p.done = end
	}
	b.Decided, b.Spared = true, slices.Sorted(maps.Keys(p.spared))
	t.removed += uint64(len(p.victims) - len(b.Spared))
	delete(t.batches, n)
	m.Wake()
	return true, nil
}

func (t *term) remove(paths []string) error {
	errs := make([]error, len(paths))
	parallel(t.m.cfg.Workers, len(paths), func(i int) {
		if err := t.m.cfg.FS.Remove(paths[i]); !errors.Is(err, fs.ErrNotExist) {
			errs[i] = err
		}
	})
	return errors.Join(errs...)
}

// balance grants credit, and proposes victims if there is too little room. It does neither in a term before an audit or a scan
// has ended: entries of dead members that other hosts found in their scans are in no log.
func (t *term) balance() error {
	m := t.m
	t.outside = 0
	var live []string
	short := map[string]int64{}
	for name, s := range t.next.Grants {
		told, published := &m.told, m.published
		if name != m.name {
			told, published = &status{}, 0
			if p := m.peers[name]; p != nil {
				told, published = &p.status, p.published
			}
		}
		if g := t.members[name]; s.End == 0 || g == nil || !g.swept {
			t.outside += max(0, s.Granted-told.Returned-published)
		}
		if s.End == 0 {
			t.outside += told.Held
			live = append(live, name)
			if told.Granted == s.Granted { // otherwise the member has not seen its last grant
				short[name] = told.Short()
			}
		}
	}
	if t.knows = t.knows || m.active() && m.Ticket() != t.ticket; !t.knows || !m.active() {
		return nil // not all entries are known yet
	}
	// The smallest wishes are served first; the rest is shared among the larger ones.
	slices.SortFunc(live, func(a, b string) int { return cmp.Or(cmp.Compare(short[a], short[b]), cmp.Compare(a, b)) })
	shorts := make([]int64, len(live))
	for i, name := range live {
		shorts[i] = short[name]
	}
	used := m.back.Used()
	gives, unmet := shared.Portions(m.cfg.Capacity-used-t.outside, shorts)
	for i, name := range live {
		t.next.Grants[name].Granted += gives[i]
		t.outside += gives[i]
	}
	return t.evict(used + t.outside + unmet)
}

// evict proposes damaged entries, and further victims if level exceeds the capacity.
func (t *term) evict(level int64) error {
	m := t.m
	proposed := map[shared.ID]bool{} // A victim must not be in two batches: if the first spared it, it could be leased again and then be removed by the second.
	for n, b := range t.next.Batches {
		if _, mine := m.Batches[n]; b.Forget != "" || b.Decided && !mine {
			continue
		}
		victims := m.Batches[n]
		if victims == nil { // It is acknowledged at the next step.
			return nil
		}
		for i := range victims {
			proposed[victims[i].ID()] = true
			level -= victims[i].Bytes
		}
	}
	victims := m.Choose(proposed, shared.Excess(level, m.cfg.Capacity), maxBatch)
	for part := range slices.Chunk(victims, maxBatch) {
		t.last++
		if _, err := m.cfg.Objects.Put(batchName(t.last), shared.EncodeVictims(part), ""); err != nil {
			return err
		}
		t.next.Batches[t.last] = &batch{}
		m.Wake()
	}
	return nil
}

// write writes the evictor's object if it has changed, or if the last write is a quarter of Lapse old. If another host has
// written it, this host stops being the evictor.
func (t *term) write() error {
	m := t.m
	at := m.cfg.Now()
	told := *m.evictor
	told.Beat = t.next.Beat
	before, err := shared.EncodeControl(&told)
	if err != nil {
		return err
	}
	if b, err := shared.EncodeControl(&t.next); err != nil || bytes.Equal(b, before) && at-t.wroteAt < m.cfg.Lapse/4 {
		return err
	}
	t.next.Beat++
	b, err := shared.EncodeControl(&t.next)
	if err != nil {
		return err
	}
	version, err := m.replace("evictor", b, m.version, func(b []byte) bool {
		o, err := decodeEvictor(b)
		return err == nil && o.Owner == m.name && o.Term == t.number
	})
	if errors.Is(err, errReplaced) {
		m.log.Warn("another host became the evictor", "term", t.number)
		m.term, m.version = nil, ""
		return nil
	} else if err != nil {
		return err
	}
	o := t.next.clone()
	m.evictor, m.version, m.seenAt, t.wroteAt = &o, version, at, at
	return nil
}

// leave writes that there is no evictor. The last member to leave also removes its own grant and log.
func (t *term) leave() error {
	m := t.m
	t.next.Owner = ""
	alone := len(t.next.Grants) == 1 && len(t.next.Batches) == 0
	for name, p := range m.peers {
		alone = alone && (name == m.name || !p.here)
	}
	if alone {
		if err := t.forget(m.name); err != nil {
			return err
		}
	}
	return t.write()
}

// audit is a background list of the whole bucket.
type audit struct {
	ticket uint64 // ticket of the audit that is due or under way; else 0
	began  time.Duration
	over   bool
	strays []Stray
	last   time.Duration        // when the last audit ended
	judged map[string]time.Time // modification times of the strays already judged in this term, by path; unchanged ones are not read again
}

// Stray is an object of the bucket that is not in the store's index.
type Stray struct {
	Path string
	Info staging.Info
}

// Audit returns the ticket of an audit that is due, or 0.
func (m *Member) Audit() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.audit.over {
		return 0
	}
	return m.audit.ticket
}

// Audited reports the strays that a list of the whole bucket has found. The list must have begun after Audit returned the
// ticket.
func (m *Member) Audited(ticket uint64, strays []Stray) {
	m.mu.Lock()
	if a := &m.audit; a.ticket == ticket {
		judged := a.judged
		a.judged = map[string]time.Time{}
		a.over, a.strays = true, slices.DeleteFunc(strays, func(s Stray) bool {
			at, is := judged[s.Path]
			if is = is && at.Equal(s.Info.ModTime); is {
				a.judged[s.Path] = at
			}
			return is
		})
	}
	m.mu.Unlock()
	m.Wake()
}

// mostStrays is the maximum number of strays read in one step.
const mostStrays = 64

// sweep starts audits, and reads and logs the strays that they find. It then releases the credit of the members that were gone
// long enough before the audit began.
func (t *term) sweep() error {
	m := t.m
	now := m.cfg.Now()
	m.mu.Lock()
	a := &m.audit
	if a.last == 0 {
		a.last = now
	}
	due := now-a.last > auditEvery || !t.knows
	for _, g := range t.members {
		due = due || !g.swept && now-g.since > m.cfg.landing()
	}
	if due && a.ticket == 0 && m.active() {
		a.ticket, a.began = max(1, m.cfg.Unique()), now
		m.Wake()
	}
	if !a.over {
		m.mu.Unlock()
		return nil
	}
	part := a.strays[:min(mostStrays, len(a.strays))]
	m.mu.Unlock()
	for i := range part {
		// No object is removed at the same time: only this host removes objects.
		r, err := m.back.Identify(part[i].Path, part[i].Info)
		switch {
		case err == nil:
			r.Op = shared.Relayed
			m.Docket.Learn(&r)
			m.Relay(r)
			m.log.Warn("an object was in no account; it is now", "object", part[i].Path)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, shared.ErrDamaged):
			return err // all strays of this part are read again
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range part {
		a.judged[part[i].Path] = part[i].Info.ModTime
	}
	if a.strays = a.strays[len(part):]; len(part) > 0 {
		m.Wake()
		return nil // the records are logged at the next step
	}
	for _, g := range t.members {
		g.swept = g.swept || a.began-g.since > m.cfg.landing()
	}
	*a, t.knows = audit{last: now, judged: a.judged}, true
	t.cleaned = false // clean up again
	return nil
}
