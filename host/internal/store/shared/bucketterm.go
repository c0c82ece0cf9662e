package shared

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"time"
)

// campaign makes this host the evictor if there is no live one. Hosts that have scanned the bucket take precedence, since they
// can grant credit without a scan.
func (b *bucket) campaign(now time.Duration) error {
	m := b.m
	next := evictor{Grants: map[string]*grant{}, Batches: map[uint64]*batchOutcome{}}
	if o := b.evictor; o != nil {
		if o.Owner != "" && now-m.seenAt <= m.cfg.Lapse && !m.isOwn(o.Owner) {
			return nil
		}
		next = *o
	}
	for name, p := range m.peers {
		if name != m.name && p.here && p.Scanned && !m.active() && now-m.seenAt <= 3*m.cfg.Lapse {
			return nil
		}
	}
	next.Term++
	next.Beat++
	next.Owner = m.name
	data, err := EncodeControl(&next)
	if err != nil {
		return err
	}
	version, err := m.cfg.Objects.Put("evictor", data, b.over)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
		return nil // another host was elected
	} else if err != nil {
		return err
	}
	b.evictor, b.over = &next, version
	b.begin()
	b.wrote(m.lastStep)
	return nil
}

// begin starts this host's term as the evictor's object describes it.
func (b *bucket) begin() {
	m := b.m
	m.begin(b.evictor.Term)
	b.cleaned, b.ticket = false, m.Ticket()
	t := m.term
	for name, g := range b.evictor.Grants {
		*t.account(name) = account{granted: g.Granted, spent: g.Spent, end: g.End, gone: g.End > 0, sealed: g.End > 0, inherited: g.End > 0}
	}
	for n, o := range b.evictor.Batches {
		p := &proposal{forget: o.Forget, written: true, judged: o.Decided, decided: o.Decided, all: o.All, spared: map[int]bool{}}
		for _, i := range o.Spared {
			p.spared[i] = true
		}
		t.batches[n] = p
	}
	m.audits.reset()
}

// wrote records the time of the last write of the evictor's object. For a while afterwards no other host is elected.
func (b *bucket) wrote(at time.Duration) {
	b.wroteAt = at
	b.m.term.until = at + b.m.cfg.Lapse/2
}

func (b *bucket) start(time.Duration) error {
	// Entries of dead members that other hosts found in their scans are in no log. So credit is granted in a term only after an
	// audit or a scan has ended.
	t := b.m.term
	t.knows = t.knows || b.m.active() && b.m.Ticket() != b.ticket
	return nil
}

// grant does nothing: finish writes the grants.
func (b *bucket) grant(string, *account) error { return nil }

func (b *bucket) seen(name string, a *account) bool {
	if name == b.m.name {
		return b.told.Granted == a.granted
	}
	return b.reading(name).Granted == a.granted
}

// expel records where the log of a member ends. No host reads what the member logs after that. Once that is written, the member
// is sealed.
func (b *bucket) expel(name string, a *account, now time.Duration) error {
	if a.end > 0 {
		return nil
	}
	list, err := b.m.cfg.Objects.List("log/" + name)
	if err != nil {
		return err
	}
	last := b.reading(name).next - 1
	for text := range list {
		if n, err := strconv.ParseUint(text, 10, 64); err == nil && n <= mostLogs {
			last = max(last, n)
		}
	}
	a.gone, a.end, a.since = true, last+1, now
	if a.swept, err = b.leftCleanly(name, last); a.swept {
		a.end = last
	}
	return err
}

// leftCleanly reports whether log object n of the member is the end mark.
func (b *bucket) leftCleanly(name string, n uint64) (bool, error) {
	data, _, err := b.m.cfg.Objects.Get(logObject(name, n), "", mostLog)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return bytes.Equal(data, end), err
}

// sweep removes the object of a member, and waits for an audit unless the member left cleanly.
func (b *bucket) sweep(name string, a *account, now time.Duration) (err error) {
	if b.m.peer(name).here {
		if err := b.m.cfg.Objects.Remove("hosts/" + name); err != nil {
			return err
		}
	}
	if a.since == 0 { // An earlier evictor recorded the end of the log.
		if a.swept, err = b.leftCleanly(name, a.end); err == nil {
			a.since = now
		}
	}
	return err
}

// forget removes the log of a member. finish writes the grants without it.
func (b *bucket) forget(name string) error {
	list, err := b.m.cfg.Objects.List("log/" + name)
	if err != nil {
		return err
	}
	for _, text := range slices.Sorted(maps.Keys(list)) {
		if err := b.m.cfg.Objects.Remove("log/" + name + "/" + text); err != nil {
			return err
		}
	}
	return nil
}

// propose stores the victims of a batch. finish writes the batch. An object that has the name is left of a term with the same
// number, whose record was removed.
func (b *bucket) propose(n uint64, p *proposal) (err error) {
	if p.forget == "" && !p.stored {
		_, err = b.replace(batchName(n), encodeVictims(p.victims), "", func([]byte) bool { return true })
	}
	p.stored = err == nil
	return err
}

// decide does nothing: finish writes the decision.
func (b *bucket) decide(uint64, *proposal) error { return nil }

func (b *bucket) drop(n uint64, p *proposal) error {
	if p.forget != "" {
		return nil
	}
	return b.m.cfg.Objects.Remove(batchName(n))
}

func (b *bucket) remove(paths []string) error {
	errs := make([]error, len(paths))
	b.parallel(len(paths), func(i int) {
		if err := b.m.cfg.FS.Remove(paths[i]); !errors.Is(err, fs.ErrNotExist) {
			errs[i] = err
		}
	})
	return errors.Join(errs...)
}

func (b *bucket) finish(now time.Duration) error {
	return errors.Join(b.clean(), b.audit(), b.write(b.m.name))
}

// clean removes batches that earlier evictors stored but did not enter in the evictor's object, and logs that members wrote
// after they were forgotten.
func (b *bucket) clean() error {
	if b.cleaned {
		return nil
	}
	t := b.m.term
	batches, err := b.m.cfg.Objects.List("batch")
	if err != nil {
		return err
	}
	for _, text := range slices.Sorted(maps.Keys(batches)) {
		if n, err := strconv.ParseUint(text, 10, 64); err != nil || t.batches[n] != nil {
			continue // It may be a batch that others know.
		} else if !t.holds() {
			return nil // It may be one of another evictor.
		}
		if err := b.m.cfg.Objects.Remove("batch/" + text); err != nil {
			return err
		}
	}
	logs, err := b.m.cfg.Objects.List("log")
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(logs)) {
		if !t.holds() {
			return nil
		} else if t.accounts[name] == nil { // A member without a grant does not log.
			if err := b.forget(name); err != nil {
				return err
			}
		}
	}
	b.cleaned = true
	return nil
}

// record returns the evictor's object as it should be.
func (b *bucket) record(owner string) *evictor {
	t := b.m.term
	next := &evictor{Term: t.number, Owner: owner, Beat: b.evictor.Beat, Grants: map[string]*grant{}, Batches: map[uint64]*batchOutcome{}}
	for name, a := range t.accounts {
		next.Grants[name] = &grant{Granted: a.granted, End: a.end}
		if a.end > 0 {
			next.Grants[name].Spent = t.spent(name, a)
		}
	}
	for n, p := range t.batches {
		if p.stored || p.written {
			next.Batches[n] = &batchOutcome{p.forget, p.judged, decision{}}
			if p.judged {
				next.Batches[n].decision = p.decision()
			}
		}
	}
	return next
}

// write writes the evictor's object if it has changed, or if the last write is a quarter of Lapse old. If another host has
// written it, this host stops being the evictor.
func (b *bucket) write(owner string) error {
	m, t, at := b.m, b.m.term, b.m.cfg.Now()
	before, err := EncodeControl(b.evictor)
	if err != nil {
		return err
	}
	next := b.record(owner)
	if data, err := EncodeControl(next); err != nil || bytes.Equal(data, before) && at-b.wroteAt < m.cfg.Lapse/4 {
		return err
	}
	next.Beat++
	data, err := EncodeControl(next)
	if err != nil {
		return err
	}
	version, err := b.replace("evictor", data, b.over, func(data []byte) bool {
		o, err := decodeEvictor(data)
		return err == nil && o.Owner == m.name && o.Term == t.number
	})
	if errors.Is(err, errReplaced) {
		b.over = ""
	}
	if err != nil {
		return err
	}
	b.evictor, b.over, m.seenAt = next, version, at
	b.wrote(at)
	for n := range next.Batches {
		p := t.batches[n]
		p.written, p.decided = true, p.judged
	}
	for _, a := range t.accounts {
		a.sealed = a.end > 0
	}
	return nil
}

func (b *bucket) deposed(err error) bool { return errors.Is(err, errReplaced) }

// resign writes that there is no evictor. The last member to leave also removes its own grant and log.
func (b *bucket) resign() error {
	m, t := b.m, b.m.term
	alone := len(t.accounts) == 1 && len(t.batches) == 0
	for name, p := range m.peers {
		alone = alone && (name == m.name || !p.here)
	}
	if alone {
		if err := b.forget(m.name); err != nil {
			return err
		}
		delete(t.accounts, m.name)
	}
	if err := b.write(""); !b.deposed(err) {
		return err
	}
	return nil
}
