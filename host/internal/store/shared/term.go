package shared

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// term is the state and the work of the elected evictor in one epoch.
type term struct {
	m       *Member
	epoch   uint64
	dir     string
	beat    beat
	beatAt  time.Duration
	seq     uint64
	peers   map[string]*peer
	batches map[uint64]*proposal
	outside int64

	counted          bool
	removed, givenUp uint64
}

// peer is the evictor's view of a member.
type peer struct {
	granted   int64
	told      int64  // total in the grant file; -1 if there is no file
	grantedAt uint64 // the peer's heartbeat when it last got a grant
	status    status
	seenAt    time.Duration // when its heartbeat was last seen to change
	gone      bool
	sealed    bool   // set once its log can no longer grow
	unknown   bool   // set if granted is too small by an unknown amount
	swept     bool   // set once all its bytes on disk are counted
	forget    uint64 // number of the batch that removes it; 0 if there is none yet
}

// proposal is a batch in the journal.
type proposal struct {
	batch
	written bool          // set once its file is durable
	verdict *decisionFile // the decision, fixed before it is written; nil until then
	decided bool
}

// step makes one round of the evictor's work.
func (t *term) step(now time.Duration, e epochs) error {
	if err := t.heartbeat(now, true); err != nil {
		return err
	}
	if !t.beat.Took || len(e.old) > 0 {
		if err := t.takeOver(e); err != nil {
			return err
		}
		t.beat.Took = true
	}
	if err := t.readPeers(now, e.begun); err != nil {
		return err
	}
	if err := t.seal(); err != nil {
		return err
	}
	unclear := t.removeDead()
	if errors.Is(unclear, ErrFenced) || missing(unclear) {
		return unclear
	}
	if err := t.decideAll(); err != nil {
		return err
	}
	if err := t.balance(); err != nil {
		return err
	}
	return errors.Join(t.writeBatches(), unclear)
}

// heartbeat writes the evictor's heartbeat. Unless always is set, it writes only if a heartbeat is due; long operations call it
// this way.
func (t *term) heartbeat(now time.Duration, always bool) error {
	if !always {
		if now = t.m.cfg.Now(); now-t.beatAt < t.m.cfg.Lapse/8 {
			return nil
		}
		if err := t.m.heartbeat(now); err != nil {
			return err
		}
	}
	t.beatAt = now
	t.beat.Beat++
	if err := t.m.put(t.dir+"/beat", t.beat); err != nil {
		return err
	}
	t.m.seen.beat, t.m.seen.beatAt = t.beat, now
	return nil
}

func (t *term) peer(name string, now time.Duration) *peer {
	p := t.peers[name]
	if p == nil {
		p = &peer{told: -1, seenAt: now}
		t.peers[name] = p
	}
	return p
}

// writeGrant writes the grant file of a member. The first grant admits the member.
func (t *term) writeGrant(name string, p *peer) error {
	if p.told == p.granted {
		return nil
	}
	if err := t.m.keep(t.dir+"/grants/"+name, grantFile{p.granted}); err != nil {
		return err
	}
	p.told, p.grantedAt = p.granted, p.status.Beat
	return nil
}

// readPeers reads the statuses of the members and expels the silent ones.
func (t *term) readPeers(now time.Duration, begun []string) error {
	live, err := t.m.list(t.m.hosts())
	if err != nil {
		return err
	}
	dead, err := t.m.list(t.m.gone())
	if err != nil {
		return err
	}
	for _, name := range live {
		p := t.peer(name, now)
		if err := t.readStatus(t.m.hosts()+"/"+name, p, now); err != nil && !missing(err) {
			return err
		}
		if name != t.m.name && now-p.seenAt > t.m.cfg.Lapse {
			t.m.log.Warn("host given up", "member", name, "silent", now-p.seenAt)
			if err := ignoreMissing(t.m.fs.Rename(t.m.hosts()+"/"+name, t.m.gone()+"/"+name)); err != nil {
				return err
			}
			p.gone = true
			t.givenUp++
			continue
		}
		if err := t.writeGrant(name, p); err != nil {
			return err
		}
	}
	for _, name := range dead {
		p := t.peer(name, now)
		p.gone = true
		if err := t.readStatus(t.m.gone()+"/"+name, p, now); err != nil && !missing(err) {
			return err
		}
	}
	for _, name := range begun { // A candidate died and left its directory.
		if !slices.Contains(live, name) {
			if err := t.m.removeAll(t.m.base + "/c." + name); err != nil {
				return err
			}
		}
	}
	for name, p := range t.peers {
		if !p.gone && !slices.Contains(live, name) && !slices.Contains(dead, name) {
			p.gone = true // It was renamed between the two listings.
		}
	}
	return nil
}

func (t *term) readStatus(dir string, p *peer, now time.Duration) error {
	var s status
	err := t.m.get(dir+"/status", &s)
	if err == nil {
		err = s.Check()
	}
	if errors.Is(err, ErrDamaged) {
		t.m.log.Warn("cannot read a member's status", "error", err)
		return nil
	}
	if err == nil && s.Beat != p.status.Beat {
		p.status, p.seenAt = s, now
	}
	return err
}

// removeDead removes members that are gone: it clears their temporaries, waits until their logs are read, and frees their
// credit. If the temporaries of a member cannot be cleared, the member keeps its credit, and the removal of the other members
// continues.
func (t *term) removeDead() (failed error) {
	for _, name := range slices.Sorted(maps.Keys(t.peers)) {
		p, dir := t.peers[name], t.m.gone()+"/"+name
		if !p.gone {
			continue
		}
		if !p.swept {
			if err := t.sweep(dir); errors.Is(err, ErrFenced) || t.m.retry != nil {
				return err // The records that the sweep found are written first, at the next step.
			} else if err != nil {
				failed = errors.Join(failed, err)
				continue
			}
			if log := t.m.tails[name]; (log == nil || !log.ended) && !t.m.absent(dir) {
				continue
			}
			p.swept = true
		}
		if p.forget == 0 { // An earlier evictor may have proposed the removal too.
			p.forget = t.propose(batch{forget: name})
			continue
		}
		if b := t.batches[p.forget]; b != nil && !b.decided {
			continue
		}
		if err := t.m.removeAll(dir); err != nil {
			return err
		}
		if err := t.m.remove(t.dir + "/grants/" + name); err != nil {
			return err
		}
		delete(t.peers, name)
	}
	return failed
}

// batch returns the batch with a number, which it creates if missing.
func (t *term) batch(n uint64) *proposal {
	if t.batches[n] == nil {
		t.batches[n] = &proposal{}
	}
	return t.batches[n]
}

// propose adds a batch to the journal in memory; writeBatches writes it.
func (t *term) propose(b batch) uint64 {
	t.seq++
	t.batches[t.seq] = &proposal{batch: b}
	return t.seq
}

// writeBatches writes proposals and repeats failed writes. Others may have read a proposal even if its write failed, so its
// number is never reused.
func (t *term) writeBatches() error {
	for _, n := range slices.Sorted(maps.Keys(t.batches)) {
		if b := t.batches[n]; !b.written && !b.decided {
			if err := t.m.keep(proposalName(t.dir, n), b.file()); err != nil {
				return err
			}
			b.written = true
		}
	}
	return nil
}

// decideAll decides the batches that every member has acknowledged, and removes those that every member has applied.
func (t *term) decideAll() error {
	for _, n := range slices.Sorted(maps.Keys(t.batches)) {
		b := t.batches[n]
		if !b.decided {
			if !b.written {
				return nil
			}
			if ok, err := t.decide(n, b); !ok || err != nil {
				return err
			}
			continue
		}
		held := slices.ContainsFunc(slices.Collect(maps.Values(t.peers)), func(p *peer) bool {
			_, has := p.status.Vetoes[n]
			return !p.gone && has
		})
		if _, mine := t.m.Batches[n]; held || mine {
			continue
		}
		// The proposal is removed first, because members would acknowledge a proposal without a decision again.
		for _, name := range [...]string{proposalName(t.dir, n), decisionName(t.dir, n)} {
			if err := t.m.remove(name); err != nil {
				return err
			}
		}
		delete(t.batches, n)
	}
	return nil
}

func (t *term) decide(n uint64, b *proposal) (bool, error) {
	if b.verdict == nil {
		if err := t.judge(n, b); b.verdict == nil {
			return false, err
		}
	}
	if err := t.m.keep(decisionName(t.dir, n), *b.verdict); err != nil {
		return false, err // Others may have read the decision nevertheless.
	}
	b.decided = true
	t.removed += uint64(len(b.victims) - len(b.verdict.Spared))
	t.m.Wake()
	return true, nil
}

// judge removes the victims of a batch except the spared ones, once every member has acknowledged the batch.
func (t *term) judge(n uint64, b *proposal) error {
	spared := map[int]bool{}
	for _, p := range t.peers {
		if p.gone {
			continue
		}
		vetoes, acked := p.status.Vetoes[n]
		if !acked {
			return nil
		}
		for _, i := range vetoes {
			spared[i] = true
		}
	}
	if err := t.emptyTrash(); err != nil { // The trash holds files of an attempt that failed, which have no other name.
		return err
	}
	for i := range b.victims {
		if spared[i] {
			continue
		}
		paths, unnamed := t.m.back.Paths(&b.victims[i])
		for k, path := range paths {
			trash := fmt.Sprintf("%s/trash/%d-%d-%d", t.dir, n, i, k)
			err := t.m.fs.Rename(path, trash)
			if absent(err) { // The file is gone, or this evictor was deposed and cannot write the decision.
				continue
			}
			if err == nil {
				err = t.m.remove(trash)
			}
			if err != nil {
				return err
			}
		}
		if unnamed != nil {
			t.m.log.Warn("victim spared: its files cannot be named", "key", b.victims[i].Key, "error", unnamed)
			spared[i] = true
		}
		if err := t.heartbeat(0, false); err != nil {
			return err
		}
	}
	b.verdict = &decisionFile{Spared: slices.Sorted(maps.Keys(spared))}
	return nil
}

// takeOver continues the work of earlier evictors. It keeps their grants and journals, and removes the rest, including the
// trash, before any bytes are counted. It may be repeated after an error.
func (t *term) takeOver(e epochs) error {
	for _, name := range e.old {
		old := t.m.base + "/" + name
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

// giveUp expels a member whose credit is unknown. Once the member's temporaries are cleared and its log is read, its credit is
// known to be 0.
func (t *term) giveUp(name string, p *peer, cause error) error {
	t.m.log.Error("cannot read a host's grant; host given up, it will join again", "member", name, "error", cause)
	p.gone, p.unknown = true, true
	return ignoreMissing(t.m.fs.Rename(t.m.hosts()+"/"+name, t.m.gone()+"/"+name))
}

func (t *term) emptyTrash() error {
	names, err := t.m.list(t.dir + "/trash")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := t.m.remove(t.dir + "/trash/" + name); err != nil {
			return err
		}
		if err := t.heartbeat(0, false); err != nil {
			return err
		}
	}
	return nil
}

// takeJournal copies the journal of an earlier evictor, so that acknowledgements stay valid. If a batch cannot be read, it is
// unknown which victims were removed. So all are decided as spared, and every member checks their files.
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
		t.batch(n).decided = true
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
		p := t.batch(n)
		p.batch, p.written = *b, true
	}
	return nil
}

// sweep removes the temporaries of a member that is gone, and logs those that were published. It may be repeated. If a
// temporary cannot be removed, for example because a network file system keeps it for a process that has it open, the member
// keeps its credit.
func (t *term) sweep(dir string) error {
	m := t.m
	entries, err := m.fs.ReadDir(dir + "/t")
	if absent(err) {
		return nil
	} else if err != nil {
		return err
	}
	a := &attempt{}
	var failed []error
	for _, e := range entries {
		name := dir + "/t/" + e.Name()
		info, err := m.fs.Stat(name)
		switch base := e.Name(); {
		case err != nil:
		case info.Links > 1 && base != probe && base != probed:
			err = t.relay(a, name, info)
		default:
			err = m.discard(name)
		}
		failed = append(failed, ignoreMissing(err))
	}
	if len(a.records) > 0 {
		for i := range a.records {
			m.Docket.Learn(&a.records[i])
		}
		if err := a.record(m); err != nil {
			return err
		}
		if err := a.clear(m); err != nil {
			return err
		}
	}
	if err := errors.Join(failed...); err != nil {
		return err
	}
	return m.remove(dir + "/t")
}

// seal ends the logs of members that are gone, before any decision is made without them. Such a host may still append to the
// file that it has open, and its records would announce victims that were removed long ago. So the last file is replaced by a
// copy. Pieces without a record in the copy are among the temporaries.
func (t *term) seal() error {
	for _, name := range slices.Sorted(maps.Keys(t.peers)) {
		p, dir := t.peers[name], t.m.gone()+"/"+name
		if !p.gone || p.sealed {
			continue
		}
		numbers, err := t.m.logs(dir)
		if err == nil && len(numbers) > 0 {
			last, copied := logName(dir, slices.Max(numbers)), t.dir+"/log.new"
			if err = t.m.copy(last, copied); err == nil {
				err = t.m.fs.Rename(copied, last)
			}
		}
		if err != nil && !absent(err) {
			return err
		}
		p.sealed = true
	}
	return nil
}

// relay adds the record of a published temporary to an attempt.
func (t *term) relay(a *attempt, name string, info staging.Info) error {
	r, err := t.m.back.Identify(name, info)
	if err == nil {
		r.Op = Relayed
		a.records, a.temps = append(a.records, r), append(a.temps, name)
		return nil
	}
	if !errors.Is(err, ErrDamaged) {
		return err
	}
	// The others could not learn its size. So the file is emptied; its piece remains damaged under the other name, and takes no
	// bytes.
	t.m.log.Warn("published temporary is damaged; its piece was emptied", "file", name, "error", err)
	return t.m.discard(name)
}

// discard truncates and removes a temporary. Its writer, which may be paused, may still have it open but no longer has credit
// for its bytes.
func (t *tree) discard(name string) error {
	f, err := t.fs.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		err = f.Close()
	}
	if err == nil {
		err = t.remove(name)
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
