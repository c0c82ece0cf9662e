package shared

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// reign is the evictor's work in one epoch.
type reign struct {
	epoch   uint64
	dir     string
	beat    beat
	beatAt  time.Duration
	seq     uint64
	peers   map[string]*peer
	batches map[uint64]*proposal
	outside int64

	counted                 bool
	removed, spared, deaths uint64
}

// peer is a member as the evictor knows it.
type peer struct {
	granted int64
	told    int64  // of granted, what is in the file; -1: no file
	beatOf  uint64 // the peer's beat when it was granted something last
	status  status
	seenAt  time.Duration // when its beat was seen to change
	gone    bool
	unknown bool   // granted is too little, who knows by how much
	swept   bool   // nothing of it is on the disk that is not accounted for
	forget  uint64 // the batch that ends it
}

// proposal is a batch in the journal.
type proposal struct {
	batch
	written bool          // its file is there for good
	verdict *decisionFile // what was decided, before that is written: from then on it is that and nothing else
	decided bool
}

// rule does the evictor's work once.
func (m *Member) rule(now time.Duration, e epochs) error {
	r := m.reign
	if err := m.pulse(now, true); err != nil {
		return err
	}
	if !r.beat.Took || len(e.old) > 0 {
		if err := m.takeOver(e); err != nil {
			return err
		}
		r.beat.Took = true
	}
	if err := m.readPeers(now, e.begun); err != nil {
		return err
	}
	if err := m.bury(now); err != nil {
		return err
	}
	if err := m.decideAll(now); err != nil {
		return err
	}
	if err := m.balance(now); err != nil {
		return err
	}
	return m.writeBatches()
}

// pulse shows that the evictor lives, in the midst of long work only when it is time to.
func (m *Member) pulse(now time.Duration, always bool) error {
	r := m.reign
	if !always {
		if now = m.cfg.Now(); now-r.beatAt < m.cfg.Lapse/8 {
			return nil
		}
		if err := m.heartbeat(now); err != nil {
			return err
		}
	}
	r.beatAt = now
	r.beat.Beat++
	if err := m.put(r.dir+"/beat", r.beat); err != nil {
		return err
	}
	m.beat, m.beatAs = r.beat, now
	return nil
}

func (r *reign) peer(name string, now time.Duration) *peer {
	p := r.peers[name]
	if p == nil {
		p = &peer{told: -1, seenAt: now}
		r.peers[name] = p
	}
	return p
}

// tellGrant hands out what was granted. The first time it admits the member.
func (m *Member) tellGrant(name string, p *peer) error {
	if p.told == p.granted {
		return nil
	}
	if err := m.keep(m.reign.dir+"/grants/"+name, grantFile{p.granted}); err != nil {
		return err
	}
	p.told, p.beatOf = p.granted, p.status.Beat
	return nil
}

// readPeers sees who lives, and gives up who does not.
func (m *Member) readPeers(now time.Duration, begun []string) error {
	r := m.reign
	live, err := m.list(m.hosts())
	if err != nil {
		return err
	}
	dead, err := m.list(m.gone())
	if err != nil {
		return err
	}
	for _, name := range live {
		p := r.peer(name, now)
		if err := m.readStatus(m.hosts()+"/"+name, p, now); err != nil && !missing(err) {
			return err
		}
		if name != m.name && now-p.seenAt > m.cfg.Lapse {
			m.log.Warn("a host was given up", "member", name, "silent", now-p.seenAt)
			if err := ignoreMissing(m.fs.Rename(m.hosts()+"/"+name, m.gone()+"/"+name)); err != nil {
				return err
			}
			p.gone = true
			r.deaths++
			continue
		}
		if err := m.tellGrant(name, p); err != nil {
			return err
		}
	}
	for _, name := range dead {
		p := r.peer(name, now)
		p.gone = true
		if err := m.readStatus(m.gone()+"/"+name, p, now); err != nil && !missing(err) {
			return err
		}
	}
	for _, name := range begun { // a candidate that died over it
		if !slices.Contains(live, name) {
			if err := m.removeAll(m.base + "/c." + name); err != nil {
				return err
			}
		}
	}
	for name, p := range r.peers {
		if !p.gone && !slices.Contains(live, name) && !slices.Contains(dead, name) {
			p.gone = true // between two looks it went from one place to the other
		}
	}
	return nil
}

func (m *Member) readStatus(dir string, p *peer, now time.Duration) error {
	var s status
	err := m.get(dir+"/status", &s)
	if errors.Is(err, ErrDamaged) {
		m.log.Warn("a member's status cannot be read", "error", err)
		return nil
	}
	if err == nil && s.Beat != p.status.Beat {
		p.status, p.seenAt = s, now
	}
	return err
}

// bury ends members that are gone: their temporaries are cleared, their logs read, and then their credit is free.
func (m *Member) bury(now time.Duration) error {
	r := m.reign
	for _, name := range slices.Sorted(maps.Keys(r.peers)) {
		p, dir := r.peers[name], m.gone()+"/"+name
		if !p.gone {
			continue
		}
		if !p.swept {
			if err := m.sweep(dir); err != nil {
				return err
			}
			if t := m.tails[name]; (t == nil || !t.ended) && m.exists(dir) {
				continue
			}
			p.swept = true
		}
		if p.forget == 0 {
			for n, b := range r.batches {
				if b.forget == name {
					p.forget = n // of an earlier evictor
				}
			}
		}
		if p.forget == 0 {
			p.forget = m.propose(batch{forget: name})
			continue
		}
		if b := r.batches[p.forget]; b != nil && !b.decided {
			continue
		}
		if err := m.removeAll(dir); err != nil {
			return err
		}
		if err := m.remove(r.dir + "/grants/" + name); err != nil {
			return err
		}
		delete(r.peers, name)
	}
	return nil
}

// propose takes a batch into the journal; writeBatches writes it.
func (m *Member) propose(b batch) uint64 {
	r := m.reign
	r.seq++
	r.batches[r.seq] = &proposal{batch: b}
	return r.seq
}

// writeBatches writes proposals until they are there: one whose writing failed may have been seen all the same, so its number
// is never another's.
func (m *Member) writeBatches() error {
	r := m.reign
	for _, n := range slices.Sorted(maps.Keys(r.batches)) {
		if b := r.batches[n]; !b.written && !b.decided {
			if err := m.keep(proposalName(r.dir, n), b.file()); err != nil {
				return err
			}
			b.written = true
		}
	}
	return nil
}

// decideAll ends the batches that every member has acknowledged, and clears those that every member has followed.
func (m *Member) decideAll(now time.Duration) error {
	r := m.reign
	for _, n := range slices.Sorted(maps.Keys(r.batches)) {
		b := r.batches[n]
		if !b.decided {
			if !b.written {
				return nil
			}
			if ok, err := m.decide(n, b); !ok || err != nil {
				return err
			}
			continue
		}
		held := slices.ContainsFunc(slices.Collect(maps.Values(r.peers)), func(p *peer) bool {
			_, has := p.status.Vetoes[n]
			return !p.gone && has
		})
		if _, mine := m.batches[n]; held || mine {
			continue
		}
		// In this order: a proposal without a decision would be acknowledged again.
		for _, name := range [...]string{proposalName(r.dir, n), decisionName(r.dir, n)} {
			if err := m.remove(name); err != nil {
				return err
			}
		}
		delete(r.batches, n)
	}
	return nil
}

func (m *Member) decide(n uint64, b *proposal) (bool, error) {
	r := m.reign
	if b.verdict == nil {
		if err := m.judge(n, b); b.verdict == nil {
			return false, err
		}
	}
	if err := m.keep(decisionName(r.dir, n), *b.verdict); err != nil {
		return false, err // it may have been followed all the same
	}
	b.decided = true
	r.spared += uint64(len(b.verdict.Spared))
	r.removed += uint64(len(b.victims) - len(b.verdict.Spared))
	m.wake()
	return true, nil
}

// judge removes a batch's victims once every member has acknowledged it, but for those that were spared.
func (m *Member) judge(n uint64, b *proposal) error {
	r := m.reign
	spared := map[int]bool{}
	for _, p := range r.peers {
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
	for i := range b.victims {
		if spared[i] {
			continue
		}
		paths, err := m.back.Paths(&b.victims[i])
		if err != nil {
			m.log.Warn("a victim is spared", "key", b.victims[i].Key, "error", err)
			spared[i] = true
			continue
		}
		for k, path := range paths {
			trash := fmt.Sprintf("%s/trash/%d-%d-%d", r.dir, n, i, k)
			err := m.fs.Rename(path, trash)
			if missing(err) {
				continue // it is gone, or this evictor is: then the decision cannot be written
			}
			if err == nil {
				err = m.remove(trash)
			}
			if err != nil {
				return err
			}
		}
		if err := m.pulse(0, false); err != nil {
			return err
		}
	}
	b.verdict = &decisionFile{Spared: slices.Sorted(maps.Keys(spared))}
	return nil
}
