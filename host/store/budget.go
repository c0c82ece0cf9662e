package store

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A root's device endures so many bytes written. With a daily budget, what is written on a day (UTC) is counted; from
// thriftFrom of the budget on, admission is strict: an entry is stored only in continuation of one that is there, or when
// it is asked for the second time, which is when it begins to look like coming back. At the budget, nothing is.
//
// What is reserved is counted before a byte is written, and taken back when nothing was. The count outlives the host. It is
// written ahead: the file says somewhat more than is counted, and says so durably before more is, so that a crash makes the
// host count too much and never too little. Only where the file cannot be written the root goes on without. Hosts that
// share a root have a file each. A clock that is set back by more than a day begins a new one.

const (
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

	saving sync.Mutex // held while the file is written; before mu
	failed bool       // the last time, it could not be; guarded by saving
}

// charge is what a put has taken from the budget of a day.
type charge struct{ day, bytes int64 }

func dayOf(t time.Time) int64 { return t.Unix() / (24 * 60 * 60) }

// turn begins a new day. b.mu is held.
func (b *budget) turn(now time.Time) {
	if day := dayOf(now); day > b.day || day < b.day-1 {
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
func (b *budget) spend(now time.Time, bytes int64, print uint64, deserves func() bool) (spent charge, ok bool) {
	if b.daily == 0 {
		return charge{}, true
	}
	parent := deserves() // it takes other locks
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	switch {
	case b.spent+bytes > b.daily:
		return charge{}, false
	case float64(b.spent+bytes) > thriftFrom*float64(b.daily) && !parent && !b.again(print):
		return charge{}, false
	}
	b.spent += bytes
	return charge{b.day, bytes}, true
}

// refund takes back what was counted and not written.
func (b *budget) refund(c *charge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.bytes > 0 && c.day == b.day {
		b.spent = max(0, b.spent-c.bytes)
	}
	*c = charge{}
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

// affords takes the bytes of a piece or an entry from the root's budget. mu is not held.
func (r *root) affords(p *Put, bytes int64, parent uint64) error {
	spent, ok := r.budget.spend(r.store.cfg.Now(), bytes, p.mark.print, func() bool { return parent != 0 && r.store.holdsPrint(parent) })
	if ok {
		p.charge = spent
		if spent.bytes > 0 {
			r.keepAhead(false)
		}
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
	text, err := r.readMeta(r.dir + "/" + r.writtenFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if b.day, b.spent, err = pieceformat.DecodeWritten(text); err != nil {
		r.log.Warn("the count of bytes written today cannot be read and begins anew", "file", r.writtenFile(), "error", err)
		b.day, b.spent = 0, 0
	}
	b.ahead = b.spent
	b.turn(r.store.cfg.Now())
	return nil
}

func (r *root) writtenFile() string {
	if r.cfg.Shared {
		return pieceformat.WrittenFile + "." + r.store.cfg.HostID
	}
	return pieceformat.WrittenFile
}

// keepAhead keeps the file ahead of the count: by half a step where there is time for it, as the upkeep has, and else only
// where it is not.
func (r *root) keepAhead(early bool) {
	b, step := &r.budget, max(r.budget.daily/budgetSteps, 1)
	if b.daily == 0 || !r.health.Takes() {
		return
	}
	behind := func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.turn(r.store.cfg.Now())
		return b.spent > b.ahead || early && b.spent+step/2 > b.ahead
	}
	if !behind() {
		return
	}
	b.saving.Lock()
	defer b.saving.Unlock()
	if (early || !b.failed) && behind() {
		r.saveWritten(step)
	}
}

// saveWritten has the file say so much more than the count. At the end it says what is so. saving is held.
func (r *root) saveWritten(more int64) {
	b := &r.budget
	b.mu.Lock()
	b.turn(r.store.cfg.Now())
	day, ahead := b.day, b.spent+more
	b.mu.Unlock()
	err := r.replaceMeta(r.writtenFile(), func(f staging.File) error {
		_, err := f.WriteAt(pieceformat.EncodeWritten(day, ahead), 0)
		return err
	})
	if b.failed = err != nil; b.failed {
		r.log.Warn("the count of bytes written today could not be kept; after a crash it is less than what was written", "error", err)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.day == day {
		b.ahead = ahead
	}
}

// endWritten has the file say what is so. Nothing else uses the root any more.
func (r *root) endWritten() {
	r.budget.saving.Lock()
	defer r.budget.saving.Unlock()
	if r.budget.daily > 0 && r.health.Takes() {
		r.saveWritten(0)
	}
}
