package store

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"
)

// A root's device endures so many bytes written. With a daily budget, what is written on a day (UTC) is counted; from
// thriftFrom of the budget on, admission is strict: an entry is stored only in continuation of one that is there, or when
// it is asked for the second time, which is when it begins to look like coming back. At the budget, nothing is.
//
// The count outlives the host. It is written ahead: the file says somewhat more than was written, so that a crash makes
// the host count too much and never too little.

const (
	writtenFile = metaDir + "/written"
	thriftFrom  = 0.8
	budgetSteps = 64 // parts of the budget that are counted ahead
	doorMarks   = 1 << 16
)

type budget struct {
	daily int64 // 0: none

	mu    sync.Mutex
	day   int64
	spent int64
	ahead int64    // what the file says
	seen  []uint32 // fingerprints that asked once, by their low bits; made when thrift begins
}

func dayOf(t time.Time) int64 { return t.Unix() / (24 * 60 * 60) }

// turn begins a new day. b.mu is held.
func (b *budget) turn(now time.Time) {
	if day := dayOf(now); day > b.day {
		b.day, b.spent, b.ahead = day, 0, 0
	}
}

// left says whether there is anything to spend.
func (b *budget) left(now time.Time) bool {
	if b.daily == 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	return b.spent < b.daily
}

// easy says whether there is enough left to spend freely.
func (b *budget) easy(now time.Time) bool {
	if b.daily == 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	return float64(b.spent) < thriftFrom*float64(b.daily)
}

// spend takes bytes from the budget, at its end only for what deserves them.
func (b *budget) spend(now time.Time, bytes int64, print uint64, deserves func() bool) (ok bool) {
	if b.daily == 0 {
		return true
	}
	parent := deserves() // it takes other locks
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	switch {
	case b.spent+bytes > b.daily:
		return false
	case float64(b.spent+bytes) > thriftFrom*float64(b.daily) && !parent && !b.again(print):
		return false
	}
	b.spent += bytes
	return true
}

// again says whether a fingerprint has asked before, and notes it. b.mu is held.
func (b *budget) again(print uint64) bool {
	if b.seen == nil {
		b.seen = make([]uint32, doorMarks)
	}
	at, is := &b.seen[print%doorMarks], uint32(print>>32)|1
	before := *at == is
	*at = is
	return before
}

// affords takes the bytes of a piece or an entry from the root's budget.
func (r *root) affords(p *Put, bytes int64, parent uint64) error {
	ok := r.budget.spend(r.store.cfg.Now(), bytes, p.mark.print, func() bool { return parent != 0 && r.store.holdsPrint(parent) })
	if ok {
		return nil
	}
	r.counted(&r.count.thrift)
	r.store.refused.Add(1)
	return fmt.Errorf("%w: the daily write budget of %s, %d bytes, is spent, or nearly and the entry is new", ErrRefused, r.dir, r.cfg.DailyWrites)
}

// loadWritten takes the count of an earlier run.
func (r *root) loadWritten() error {
	b := &r.budget
	if b.daily = r.cfg.DailyWrites; b.daily == 0 {
		return nil
	}
	text, err := r.readMeta(r.dir + "/" + writtenFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := fmt.Sscanf(string(text), "%d %d\n", &b.day, &b.spent); err != nil {
		r.log.Warn("the count of bytes written today cannot be read and begins anew", "file", writtenFile, "error", err)
		b.day, b.spent = 0, 0
	}
	b.turn(r.store.cfg.Now())
	return nil
}

// saveWritten is the upkeep's part: it keeps the file ahead of the count. At the end the file says what is so.
func (r *root) saveWritten(end bool) {
	b := &r.budget
	if b.daily == 0 || !r.takes() {
		return
	}
	b.mu.Lock()
	b.turn(r.store.cfg.Now())
	day, ahead := b.day, b.spent
	if step := max(b.daily/budgetSteps, 1); !end {
		if b.spent+step/2 <= b.ahead {
			b.mu.Unlock()
			return
		}
		ahead += step
	}
	b.ahead = ahead
	b.mu.Unlock()
	name := r.dir + "/" + writtenFile
	temp := tempName(name, r.store.cfg.HostID, r.store.seq.Add(1))
	err := r.writeMeta(temp, fmt.Appendf(nil, "%d %d\n", day, ahead))
	if err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		r.discard(temp, Page)
		r.log.Warn("the count of bytes written today could not be kept", "error", err)
	}
}
