package shared

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// epochBits is the number of bits of an epoch. The numbers of its batches have the epoch in the bits above the low 32.
const epochBits = 31

// epochs lists the directories of the evictors.
type epochs struct {
	highest uint64   // highest number ever used
	old     []string // names of the x<n>.<member>
	begun   []string // members that have a c.<member>
}

// beat is the content of the evictor's heartbeat file.
type beat struct {
	Owner string `json:"owner"`
	Beat  uint64 `json:"beat"`
	Took  bool   `json:"took"` // set once the journals of earlier epochs are copied into this one
}

// office returns the directory of this host's term.
func (d *directory) office() string { return d.epochDir(d.m.term.number) }

// old returns the name under which the directory of an epoch waits for the next evictor.
func (d *directory) old(n uint64) string { return fmt.Sprintf("%s/x%d.%s", d.base, n, d.m.name) }

// readEpochs finds the current evictor and notes changes of its heartbeat.
func (d *directory) readEpochs(now time.Duration) error {
	m := d.m
	var e epochs
	var top uint64
	names, err := d.list(d.base)
	if err != nil {
		return err
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
		case err != nil:
		case name[0] == 'e' && name == "e"+number:
			top = max(top, n)
			e.highest = max(e.highest, n)
		case name[0] == 'x':
			e.old = append(e.old, name)
			e.highest = max(e.highest, n)
		}
	}
	d.epochs = e
	if m.term != nil && m.term.number < top {
		m.log.Warn("another host is the evictor now", "epoch", top)
		m.term = nil
	}
	var b beat
	if top != 0 {
		if err := d.get(d.epochDir(top)+"/beat", &b, mostGrant); err != nil && !missing(err) {
			m.log.Warn("cannot read the evictor's heartbeat", "error", err)
		}
	}
	if top != m.view.number || b != d.beat || m.seenAt == 0 {
		m.seenAt = max(1, now)
	}
	d.beat, m.view.number, m.view.owner = b, top, b.Owner
	return nil
}

// campaign makes this host the evictor if there is no live one.
func (d *directory) campaign(now time.Duration) error {
	m := d.m
	if d.epochs.highest+1 >= 1<<epochBits { // The directory of the next one would be none, and each host would be elected.
		m.log.Error("a directory has the last number of an epoch; no host can be the evictor before it is removed", "epoch", d.epochs.highest)
		return nil
	}
	if n := m.view.number; n != 0 {
		if now-m.seenAt <= m.cfg.Lapse && !(m.isOwn(m.view.owner) && m.view.owner != m.name) {
			if slices.Contains(d.epochs.begun, m.name) { // An earlier attempt failed half way, and another host was elected.
				return d.removeAll(d.base + "/c." + m.name)
			}
			return nil
		}
		if d.shouldWait(now - m.cfg.Lapse) {
			return nil
		}
		if err := d.fs.Rename(d.epochDir(n), d.old(n)); err != nil {
			return ignoreMissing(err) // another host was elected
		}
		m.log.Warn("evictor given up", "epoch", n, "member", m.view.owner)
	} else if d.shouldWait(now) {
		return nil
	}
	// This host may have been expelled since, and its candidate directory removed.
	return ignoreMissing(d.takeEpoch(d.epochs.highest + 1))
}

// shouldWait reports whether this host should let others campaign first: hosts that have scanned the root can grant credit
// without a scan.
func (d *directory) shouldWait(now time.Duration) bool {
	m := d.m
	return !m.active() && now-m.seenAt <= 2*m.cfg.Lapse &&
		slices.ContainsFunc(d.live, func(name string) bool { return name != m.name && !m.isOwn(name) })
}

// takeEpoch renames a prepared directory to e<n>, unless that exists.
func (d *directory) takeEpoch(n uint64) error {
	m := d.m
	mine, dir := d.base+"/c."+m.name, d.epochDir(n)
	if err := d.removeAll(mine); err != nil {
		return err
	}
	for _, sub := range []string{"", "/grants", "/journal", "/trash"} {
		if err := d.fs.MkdirAll(mine+sub, 0o700); err != nil {
			return err
		}
	}
	d.mine, d.littered = beat{Owner: m.name}, false
	if err := d.put(mine+"/beat", d.mine); err != nil {
		return err
	}
	if err := d.fs.Rename(mine, dir); err != nil {
		var have beat
		if gerr := d.get(dir+"/beat", &have, mostGrant); gerr != nil || have.Owner != m.name {
			return d.removeAll(mine) // another host was elected
		}
	}
	// Other hosts may have used higher numbers while this host was paused.
	names, err := d.list(d.base)
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
			return ignoreMissing(d.fs.Rename(dir, d.old(n)))
		case name[0] == 'e' && k < n: // left by another paused host
			if err := ignoreMissing(d.fs.Rename(d.epochDir(k), d.old(k))); err != nil {
				return err
			}
		}
	}
	m.begin(n)
	m.term.knows, m.term.until, d.beat = true, forever, d.mine
	for _, p := range m.peers { // Only the evictor reads the statuses.
		p.seenAt = m.lastStep
	}
	return nil
}

// start writes the evictor's heartbeat, and continues the work of earlier evictors.
func (d *directory) start(now time.Duration) error {
	m := d.m
	d.mine.Beat++
	if err := d.put(d.office()+"/beat", d.mine); err != nil {
		return err
	}
	d.beat, m.seenAt = d.mine, now
	if !d.mine.Took || len(d.epochs.old) > 0 {
		if err := d.takeOver(now); err != nil {
			return err
		}
		d.mine.Took = true
	}
	for _, name := range d.epochs.begun { // A candidate died and left its directory.
		if !slices.Contains(d.live, name) {
			if err := d.removeAll(d.base + "/c." + name); err != nil {
				return err
			}
		}
	}
	return nil
}

// takeOver copies the grants and the journals of earlier evictors, so that acknowledgements stay valid, and removes the rest,
// including the trash, before any bytes are counted. It may be repeated after an error.
func (d *directory) takeOver(now time.Duration) error {
	t := d.m.term
	for _, name := range d.epochs.old {
		old := d.base + "/" + name
		grants, err := d.list(old + "/grants")
		if err != nil {
			return err
		}
		for _, member := range grants {
			if strings.HasSuffix(member, ".new") {
				continue
			}
			a := t.account(member)
			granted, err := d.granted(old, member)
			if errors.Is(err, ErrDamaged) {
				// Once the temporaries of the member are cleared and its log is read, its credit is known to be 0.
				d.m.log.Error("cannot read a host's grant; host given up, it will join again", "member", member, "error", err)
				a.unknown = true
				if err := d.expel(member, a, now); err != nil {
					return err
				}
			} else if err != nil {
				return err
			}
			a.granted = max(a.granted, granted)
		}
		if err := d.takeJournal(old); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.accounts)) {
		if err := d.grant(name, t.accounts[name]); err != nil {
			return err
		}
	}
	for _, name := range d.epochs.old {
		if err := d.removeAll(d.base + "/" + name); err != nil {
			return err
		}
	}
	return nil
}

// takeJournal copies the journal of an earlier evictor. Members read the copies once Took is set.
func (d *directory) takeJournal(old string) error {
	t := d.m.term
	batches, err := d.readJournal(old)
	if err != nil {
		return err
	}
	for _, n := range slices.Sorted(maps.Keys(batches)) {
		for _, name := range []func(string, uint64) string{decisionName, proposalName} {
			b, err := d.getBytes(name(old, n), mostBatch)
			if err != nil && !absent(err) && !errors.Is(err, ErrDamaged) {
				return err
			}
			if !absent(err) {
				if err := d.keepBytes(name(d.office(), n), b); err != nil {
					return err
				}
			}
		}
		t.seq = max(t.seq, n)
		if t.batches[n] == nil {
			t.batches[n] = &proposal{written: true}
		}
		if b := t.batches[n]; batches[n] {
			b.judged, b.decided = true, true
		}
	}
	return nil
}

func (d *directory) grant(name string, a *account) error {
	if a.told == a.granted {
		return nil
	}
	if err := d.keep(grantName(d.office(), name), grantFile{a.granted}); err != nil {
		return err
	}
	a.told, a.grantedAt = a.granted, d.m.peer(name).Beat
	return nil
}

func (d *directory) seen(name string, a *account) bool { return d.m.peer(name).Beat >= a.grantedAt+2 }

// expel moves a member's directory away and ends its log. A host that is paused may still append to the file that it has open,
// and its records would announce victims that were removed long ago. So the last file is replaced by a copy. Pieces without a
// record in the copy are among the temporaries.
func (d *directory) expel(name string, a *account, _ time.Duration) error {
	if err := d.moveAway(name); err != nil {
		return err
	}
	a.gone = true
	dir := d.gone() + "/" + name
	numbers, err := d.logs(dir)
	if err == nil && len(numbers) > 0 {
		last, copied := logName(dir, slices.Max(numbers)), d.office()+"/log.new"
		if err = d.copy(last, copied); err == nil {
			err = d.fs.Rename(copied, last)
		}
	}
	if odd(err) { // no host appends to it
		err = nil
	}
	a.sealed = ignoreMissing(err) == nil
	return ignoreMissing(err)
}

// sweep removes the temporaries of a member, and logs those that were published. It may be repeated. If a temporary cannot be
// removed, for example because a network file system keeps it for a process that has it open, the member keeps its credit.
func (d *directory) sweep(name string, a *account, _ time.Duration) error {
	m, dir := d.m, d.gone()+"/"+name
	entries, err := d.fs.ReadDir(dir + "/t")
	if odd(err) { // it is no host's
		a.swept = m.peer(name).ended
		return nil
	}
	if err != nil && !absent(err) {
		return err
	}
	var failed []error
	relayed := false
	for _, e := range entries {
		temp := dir + "/t/" + e.Name()
		info, err := d.fs.Stat(temp)
		switch base := e.Name(); {
		case err != nil:
		case info.Links > 1 && base != probe && base != probed:
			var r Record
			if r, err = m.back.Identify(temp, info); err == nil {
				m.relay(r, temp)
				relayed = true
			} else if errors.Is(err, ErrDamaged) {
				// The others could not learn its size. So the file is emptied; its piece remains damaged under the other name, and takes
				// no bytes.
				m.log.Warn("published temporary is damaged; its piece was emptied", "file", temp, "error", err)
				err = d.discard(temp)
			}
		default:
			err = d.discard(temp)
		}
		failed = append(failed, ignoreMissing(err))
	}
	if err := errors.Join(failed...); err != nil || relayed {
		return err // The records are logged at the next step, and then the temporaries are removed.
	}
	if err := d.unlink(dir + "/t"); err != nil {
		return err
	}
	a.swept = m.peer(name).ended || d.absent(dir)
	return nil
}

func (d *directory) forget(name string) error {
	if err := d.removeAll(d.gone() + "/" + name); err != nil {
		return err
	}
	return d.unlink(grantName(d.office(), name))
}

func (d *directory) propose(n uint64, b *proposal) error {
	err := d.keep(proposalName(d.office(), n), batchFile{b.forget, encodeVictims(b.victims)})
	b.written = err == nil
	return err
}

func (d *directory) decide(n uint64, b *proposal) error {
	err := d.keep(decisionName(d.office(), n), b.decision())
	b.decided = err == nil
	return err
}

// drop removes the proposal first, because members would acknowledge a proposal without a decision again.
func (d *directory) drop(n uint64, _ *proposal) error {
	if err := d.unlink(proposalName(d.office(), n)); err != nil {
		return err
	}
	return d.unlink(decisionName(d.office(), n))
}

// remove moves files to the trash, which an evictor that was deposed cannot do, and removes them there.
func (d *directory) remove(paths []string) error {
	dir := d.office() + "/trash/"
	if d.littered {
		names, err := d.list(dir[:len(dir)-1])
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := d.unlink(dir + name); err != nil {
				return err
			}
		}
	}
	for _, path := range paths {
		d.removed++
		trash := dir + strconv.FormatUint(d.removed, 10)
		d.littered = true
		err := d.fs.Rename(path, trash)
		if absent(err) { // The file is gone, or this evictor was deposed and cannot write the decision.
			continue
		}
		if err == nil {
			err = d.unlink(trash)
		}
		if err != nil {
			return err
		}
	}
	d.littered = false
	return nil
}

func (d *directory) finish(time.Duration) error { return nil }

func (d *directory) deposed(err error) bool { return missing(err) && d.absent(d.office()) }

// discard truncates and removes a temporary. Its writer, which may be paused, may still have it open but no longer has credit
// for its bytes.
func (t *tree) discard(name string) error {
	f, err := t.fs.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		err = f.Close()
	}
	if err == nil {
		err = t.unlink(name)
	}
	return err
}

// copy copies a log file.
func (t *tree) copy(from, to string) error {
	r, err := t.fs.OpenFile(from, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := t.fs.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.NewOffsetWriter(w, 0), io.NewSectionReader(r, 0, math.MaxInt64))
	return errors.Join(err, w.Close())
}
