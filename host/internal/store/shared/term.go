package shared

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"
)

// term is the state and the work of the elected evictor.
type term struct {
	m        *Member
	number   uint64
	seq      uint64 // number of the last batch
	accounts map[string]*account
	batches  map[uint64]*proposal
	knows    bool          // set once everything that was stored before the term began is counted
	until    time.Duration // no other host can be the evictor before
	outside  int64
	room     int64 // free bytes at the time when the term knew all entries, which bound the credit of inherited accounts; -1 before

	admitNext, removeNext string // where admit and removeGone go on; they begin with it

	counted          bool
	removed, givenUp uint64
}

// account is the evictor's account of a member.
type account struct {
	granted int64
	unknown bool // set if granted is too small by an unknown amount
	gone    bool // set once the member is expelled or has left
	sealed  bool // set once its log can no longer grow
	swept   bool // set once all that it stored is counted

	// of a directory
	told      int64  // total in the grant file; -1 if there is no file
	grantedAt uint64 // the member's heartbeat when it last got a grant

	// of a bucket
	inherited bool          // set if it was gone before the term began, so that its totals may be unknown
	spent     int64         // of an inherited account: least part of granted that was published or returned, as its evictor knew it
	end       uint64        // number after the last log object with records, once the member is gone; else 0
	since     time.Duration // when end was seen first
}

// proposal is a batch: victims, or a member to forget.
type proposal struct {
	forget  string
	victims []Victim      // nil also if an earlier evictor has proposed them
	stored  bool          // set once a bucket has the victims
	written bool          // set once the others can read it
	since   time.Duration // when it was first waited for

	done    int // number of victims removed or spared so far
	spared  map[int]bool
	all     bool // set if it is unknown which victims were removed
	judged  bool // set once the decision is fixed
	decided bool // set once the others can read the decision
}

// decision returns the decision of a batch that is judged.
func (b *proposal) decision() decision { return decision{slices.Sorted(maps.Keys(b.spared)), b.all} }

// begin starts a term of this host.
func (m *Member) begin(number uint64) {
	m.log.Info("elected evictor of the shared root", "term", number)
	m.term = &term{
		m: m, number: number, seq: number << 32, room: -1, accounts: map[string]*account{}, batches: map[uint64]*proposal{},
	}
	m.view.number, m.view.owner, m.seenAt = number, m.name, m.lastStep
	m.Wake()
}

// step makes one round of the evictor's work.
func (t *term) step(now time.Duration) error {
	if err := t.m.medium.start(now); err != nil {
		return err
	}
	failed := []error{t.admit(now), t.removeGone(now)}
	if t.holds() && !t.m.relayed { // Members must not learn of a victim after its removal.
		failed = append(failed, t.decideAll())
	}
	return errors.Join(append(failed, t.balance(), t.write(), t.m.medium.finish(now))...)
}

// holds reports whether no other host can have been elected yet.
func (t *term) holds() bool { return t.m.cfg.Now() < t.until && t.m.Fresh() }

// account returns the account of a member, which it opens if there is none.
func (t *term) account(name string) *account {
	a := t.accounts[name]
	if a == nil {
		a = &account{told: -1}
		t.accounts[name] = a
	}
	return a
}

// phase returns a function that reports whether a part of a step has taken so long that the rest of it must wait for the next step.
// There may be any number of members, and the heartbeat must not be late for them.
func (t *term) phase() (over func() bool) {
	began := t.m.cfg.Now()
	return func() bool {
		if t.m.cfg.Now()-began <= t.m.cfg.Lapse/16 {
			return false
		}
		t.m.Wake()
		return true
	}
}

// namesFrom returns the names of all accounts, and begins with the given one. A member that takes the time of its part in each step
// delays the others by one step, not for good.
func (t *term) namesFrom(name string) []string {
	list := slices.Sorted(maps.Keys(t.accounts))
	i, _ := slices.BinarySearch(list, name)
	return slices.Concat(list[i:], list[:i])
}

// admit gives grants to members that have joined, and expels members that are silent or gone.
func (t *term) admit(now time.Duration) (failed error) {
	m, over := t.m, t.phase()
	for name := range m.peers {
		t.account(name)
	}
	for _, name := range t.namesFrom(t.admitNext) {
		a, p := t.accounts[name], m.peer(name)
		if over() {
			t.admitNext = name
			break
		}
		var err error
		switch silent := now - p.seenAt; {
		case a.gone:
		case name == m.name || p.here && silent <= m.cfg.Lapse:
			err = m.medium.grant(name, a)
		default:
			if err = m.medium.expel(name, a, now); a.gone && p.here {
				m.log.Warn("host given up", "member", name, "silent", silent)
				t.givenUp++
			}
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// removeGone removes members that are gone. Once everything that such a member stored is counted, it proposes to forget the
// member. A failure with one member does not delay the others.
func (t *term) removeGone(now time.Duration) (failed error) {
	over, forgotten := t.phase(), map[string]bool{}
	for _, b := range t.batches {
		forgotten[b.forget] = true
	}
	for _, name := range t.namesFrom(t.removeNext) {
		a := t.accounts[name]
		if !a.gone || forgotten[name] {
			continue
		}
		if over() {
			t.removeNext = name
			break
		}
		if !a.sealed {
			failed = errors.Join(failed, t.m.medium.expel(name, a, now))
		}
		if a.sealed && !a.swept {
			failed = errors.Join(failed, t.m.medium.sweep(name, a, now))
		}
		if a.swept {
			t.propose(&proposal{forget: name})
		}
	}
	return failed
}

// propose adds a batch in memory.
func (t *term) propose(b *proposal) uint64 {
	t.seq++
	t.batches[t.seq] = b
	return t.seq
}

// write writes the batches that are not written yet. Others may have read a batch even if its write failed, so its number is
// never used for another.
func (t *term) write() error {
	over := t.phase()
	for _, n := range slices.Sorted(maps.Keys(t.batches)) {
		if b := t.batches[n]; !b.written {
			if over() {
				break
			}
			if err := t.m.medium.propose(n, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// acks returns the vetoes of all members. all is set if each of them has acknowledged the batch, any if at least one has.
func (t *term) acks(n uint64) (vetoes map[int]bool, all, any bool) {
	vetoes, all = map[int]bool{}, true
	for name, a := range t.accounts {
		if a.sealed {
			continue
		}
		list, acked := t.m.peer(name).Vetoes[n]
		all, any = all && acked, any || acked
		for _, i := range list {
			vetoes[int(i)] = true
		}
	}
	return vetoes, all, any
}

// decideAll decides the batches that every member has acknowledged, and removes those that every member has applied. A batch is
// not decided before an earlier one.
func (t *term) decideAll() error {
	over := t.phase()
	for _, n := range slices.Sorted(maps.Keys(t.batches)) {
		b := t.batches[n]
		if over() {
			break
		}
		if !b.judged {
			if over, err := t.judge(n, b); err != nil || !over {
				return err
			}
		}
		if !b.decided {
			if err := t.m.medium.decide(n, b); err != nil {
				return err // Others may have read the decision nevertheless.
			}
			continue
		}
		if _, mine := t.m.batches[n]; mine {
			continue
		} else if _, _, any := t.acks(n); any {
			continue
		}
		if b.forget != "" {
			if err := t.m.medium.forget(b.forget); err != nil {
				return err
			}
			delete(t.accounts, b.forget)
		}
		if err := t.m.medium.drop(n, b); err != nil {
			return err
		}
		delete(t.batches, n)
	}
	return nil
}

// unreadLapses is the number of lapses after which a batch ends that not all members have acknowledged. All of them are alive, or
// they would be gone by then.
const unreadLapses = 4

// judge removes the victims of a batch except the spared ones, once every member has acknowledged the batch. If that takes too
// long it returns with over unset and continues at the next step, so that heartbeats are not delayed.
func (t *term) judge(n uint64, b *proposal) (over bool, err error) {
	m := t.m
	vetoes, all, _ := t.acks(n)
	victims, mine := m.batches[n]
	if b.since == 0 {
		b.since = m.lastStep
	}
	switch wait := m.lastStep - b.since; {
	case b.written && all && mine:
	case b.written && b.forget == "" && wait > unreadLapses*m.cfg.Lapse: // Some member cannot read it, so all of them check the victims.
		if err := m.medium.remove(nil); err != nil {
			return false, err
		}
		m.unreport(b.victims)
		b.all = true
	default:
		return false, nil
	}
	if b.spared == nil {
		b.spared = map[int]bool{}
	}
	maps.Copy(b.spared, vetoes)
	most := 4 * m.cfg.Workers
	for began := m.cfg.Now(); b.done < len(victims) && !b.all; {
		if !t.holds() || m.cfg.Now()-began > m.cfg.Lapse/8 {
			m.Wake()
			return false, nil
		}
		end := min(b.done+max(1, most), len(victims))
		var paths []string
		for i := b.done; i < end; i++ {
			if b.spared[i] {
				continue
			}
			list, unnamed := m.back.Paths(&victims[i])
			if unnamed != nil {
				m.log.Warn("victim spared: its files cannot be named", "key", victims[i].Key, "error", unnamed)
				b.spared[i] = true
				continue
			}
			paths = append(paths, list...)
		}
		if err := m.medium.remove(paths); err != nil {
			return false, err
		}
		b.done = end
	}
	if b.judged = true; !b.all {
		t.removed += uint64(b.done - len(b.spared))
	}
	m.Wake()
	return true, nil
}

// spent returns the least part of a member's credit that it has published or returned.
func (t *term) spent(name string, a *account) int64 {
	p, published := t.m.peer(name), t.m.published
	if name != t.m.name {
		published = p.published
	}
	return max(a.spent, p.Returned+published)
}

// maxBatch is the maximum number of victims in a batch, and mostBatches that of batches that not every member has applied.
const (
	maxBatch    = 1024
	mostBatches = 64
)

// Eviction begins when more than high of the capacity is in use or granted, and frees space down to low.
const high, low = 0.95, 0.90

// balance grants credit, and proposes victims if there is too little room. It does neither before all entries are known.
func (t *term) balance() error {
	m := t.m
	t.outside = 0
	var live []string
	short := map[string]int64{} // 0 until the member has seen its latest grant
	unknown, inherited := false, int64(0)
	for name, a := range t.accounts {
		p := m.peer(name)
		if !a.swept {
			unknown = unknown || a.unknown // Its bytes are unknown until its temporaries are cleared.
			if left := max(0, a.granted-t.spent(name, a)); a.inherited {
				inherited += left
			} else {
				t.outside += left
			}
		}
		if !a.gone {
			t.outside += p.Held
			live = append(live, name)
			if m.medium.seen(name, a) {
				short[name] = p.short()
			}
		}
	}
	if unknown || !t.knows || !m.active() {
		t.outside += inherited
		return nil
	}
	// If no evictor knew how much a member had spent that is gone, its outstanding credit looks like all that it was ever granted. With
	// the pieces, it was at most the capacity: without this bound, all pieces would go until the next audit.
	used := m.back.Used()
	if t.room < 0 {
		t.room = max(0, m.cfg.Capacity-used)
	}
	inherited = min(inherited, t.room)
	t.outside += inherited
	// The smallest wishes are served first; the rest is shared among the larger ones.
	slices.SortFunc(live, func(a, b string) int { return cmp.Or(cmp.Compare(short[a], short[b]), cmp.Compare(a, b)) })
	room, unmet, over := m.cfg.Capacity-used-t.outside, int64(0), t.phase()
	for i, name := range live {
		give := min(short[name], max(0, room)/int64(len(live)-i))
		room, unmet = room-give, unmet+short[name]-give
		if give == 0 || over() {
			continue
		}
		a := t.accounts[name]
		a.granted += give
		t.outside += give
		if err := m.medium.grant(name, a); err != nil {
			return err // The grant stays counted, and is written at the next step.
		}
	}
	level := used + t.outside + unmet
	if unmet == 0 {
		level -= inherited // nothing is needed of the room that is reserved for members that are gone
	}
	t.evict(level)
	return nil
}

// evict proposes damaged entries, and further victims if level bytes are in use, granted or wanted and that is above the high
// watermark. Victims in undecided batches are not proposed again: if the first batch spared one, it could be leased again and
// then be removed by the second.
func (t *term) evict(level int64) {
	proposed, open := map[ID]bool{}, 0
	for n, b := range t.batches {
		victims, mine := t.m.batches[n]
		if !mine {
			victims = b.victims
		}
		if b.decided && !mine || b.forget != "" {
			continue
		} else if victims == nil && !mine {
			return // An earlier evictor has proposed it, and this host acknowledges it at the next step.
		}
		for i := range victims {
			proposed[victims[i].ID()] = true
			level -= victims[i].Bytes // these bytes are being removed
		}
		open++
	}
	if open >= mostBatches { // each member's status has its vetoes of all of them
		return
	}
	excess := int64(0)
	if level > int64(high*float64(t.m.cfg.Capacity)) {
		excess = level - int64(low*float64(t.m.cfg.Capacity))
	}
	victims := t.m.choose(proposed, excess, maxBatch)
	for part := range slices.Chunk(victims, maxBatch) {
		t.propose(&proposal{victims: part})
		t.m.proposed(part)
	}
	if len(victims) > 0 {
		t.m.Wake()
	}
}
