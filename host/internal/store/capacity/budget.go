package capacity

import (
	"sync"
	"sync/atomic"
	"time"
)

// Budget limits the bytes that are written to a root in a day (UTC), to protect the endurance of its device. When the part
// savingFrom has been used, only two kinds of entries are admitted: those that continue a resident entry, and those that are
// requested for the second time, which makes it likely that they will be used again. When the budget is used up, nothing is
// admitted.
//
// Bytes are charged when they are reserved, and refunded if they are not written. The count survives restarts in a file. The
// number in the file is raised durably before the count exceeds it. After a crash the count is therefore too high and never too
// low. If the file cannot be written, the root continues without it. Setting the clock back by more than a day begins a new
// day.
type Budget struct {
	daily atomic.Int64 // bytes a day; 0 means no limit
	now   func() time.Time
	file  BudgetFile

	mu    sync.Mutex
	day   int64
	spent int64
	ahead int64    // count that the file holds; spent may not exceed it before the file is written again
	seen  []uint32 // doorkeeper: one fingerprint for each value of the low bits, each requested once; nil until saving begins

	saving sync.Mutex // held while the file is written; taken before mu
	failed bool       // the last write of the file failed; guarded by saving
}

// BudgetFile stores the count.
type BudgetFile interface {
	Load() (day, bytes int64, err error) // zeros if there is no file
	Save(day, bytes int64) error         // durable when it returns
}

const (
	savingFrom  = 0.8
	budgetSteps = 64 // the file is raised in steps of one such part of the budget
	doorkeepers = 1 << 16
)

// Charge is an amount taken from the budget of one day.
type Charge struct{ Day, Bytes int64 }

// NewBudget returns a budget of daily bytes a day. 0 means no limit.
func NewBudget(daily int64, now func() time.Time, file BudgetFile) *Budget {
	b := &Budget{now: now, file: file}
	b.daily.Store(daily)
	return b
}

// Daily returns the bytes that may be written in a day. 0 means no limit.
func (b *Budget) Daily() int64 { return b.daily.Load() }

// SetDaily changes the daily bytes. A root without a budget does not count its writes, so a new budget continues from the count
// in the file.
func (b *Budget) SetDaily(daily int64) error {
	if b.daily.Load() == 0 && daily > 0 {
		if err := b.load(); err != nil {
			return err
		}
	}
	b.daily.Store(daily)
	return nil
}

// Load reads the count of an earlier run.
func (b *Budget) Load() (err error) {
	if b.daily.Load() == 0 {
		return nil
	}
	return b.load()
}

func (b *Budget) load() (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.day, b.spent, err = b.file.Load(); err != nil {
		return err
	}
	b.ahead = b.spent
	return nil
}

// turn starts a new day if it is due. b.mu must be held.
func (b *Budget) turn() {
	if day := b.now().Unix() / (24 * 60 * 60); day > b.day || day < b.day-1 {
		b.day, b.spent, b.ahead = day, 0, 0
	}
}

// Left reports whether any of the budget is left, and whether there is plenty, so that everything is admitted.
func (b *Budget) Left() (any, plenty bool) {
	daily := b.daily.Load()
	if daily == 0 {
		return true, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	return b.spent < daily, float64(b.spent) < savingFrom*float64(daily)
}

// Spent returns the bytes counted today.
func (b *Budget) Spent() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	return b.spent
}

// Charge charges the budget. If little is left, it does so only for an entry that continues a resident one, or that is
// requested for the second time.
func (b *Budget) Charge(bytes int64, fingerprint uint64, continues func() bool) (c Charge, ok bool) {
	daily := b.daily.Load()
	if daily == 0 {
		return Charge{}, true
	}
	parent := continues() // called without b.mu, because it takes other locks
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	switch {
	case b.spent+bytes > daily:
		return Charge{}, false
	case float64(b.spent+bytes) > savingFrom*float64(daily) && !parent && !b.again(fingerprint):
		return Charge{}, false
	}
	b.spent += bytes
	return Charge{b.day, bytes}, true
}

// Refund returns a charge of which nothing was written.
func (b *Budget) Refund(c *Charge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.Bytes > 0 && c.Day == b.day {
		b.spent = max(0, b.spent-c.Bytes)
	}
	*c = Charge{}
}

// Saved returns bytes that a piece did not need because it was compressed. A charge from before midnight is returned to the new
// day.
func (b *Budget) Saved(bytes int64) {
	if bytes <= 0 || b.daily.Load() == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	b.spent = max(0, b.spent-bytes)
}

// again reports whether a fingerprint was requested before, and records it. b.mu must be held.
func (b *Budget) again(fingerprint uint64) bool {
	if b.seen == nil {
		b.seen = make([]uint32, doorkeepers)
	}
	at, is := &b.seen[fingerprint%doorkeepers], uint32(fingerprint>>32)|1
	before := *at == is
	*at = is
	return before
}

// Save keeps the file ahead of the count. With early set, it does so when less than half a step is left, otherwise only when
// the count has reached the file. An error is about the file.
func (b *Budget) Save(early bool) error {
	if b.daily.Load() == 0 {
		return nil
	}
	step := max(b.daily.Load()/budgetSteps, 1)
	behind := func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.turn()
		return b.spent > b.ahead || early && b.spent+step/2 > b.ahead
	}
	if !behind() {
		return nil
	}
	b.saving.Lock()
	defer b.saving.Unlock()
	if !early && b.failed || !behind() {
		return nil
	}
	return b.save(step)
}

// SaveExact writes the exact count when the host stops.
func (b *Budget) SaveExact() error {
	if b.daily.Load() == 0 {
		return nil
	}
	b.saving.Lock()
	defer b.saving.Unlock()
	return b.save(0)
}

// save writes the count plus more bytes. b.saving must be held.
func (b *Budget) save(more int64) error {
	b.mu.Lock()
	b.turn()
	day, ahead := b.day, b.spent+more
	b.mu.Unlock()
	err := b.file.Save(day, ahead)
	if b.failed = err != nil; b.failed {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.day == day {
		b.ahead = ahead
	}
	return nil
}
