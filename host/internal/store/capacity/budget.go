package capacity

import (
	"sync"
	"sync/atomic"
	"time"
)

// Budget counts the bytes that are written to a root in a day (UTC), for the sake of its device's endurance. From
// savingFrom of the budget on, only two kinds of entries are admitted: those that continue one that is there, and those
// that ask for the second time, which is when they begin to look like coming back. At the budget, nothing is admitted.
//
// What is reserved is charged before a byte is written, and refunded when nothing was. The count outlives the host. It
// is saved ahead: the file says somewhat more than is counted, durably, before more is counted, so that after a crash
// the host counts too much and never too little. Only where the file cannot be written the root continues without it. A
// clock that is set back by more than a day begins a new day.
type Budget struct {
	daily atomic.Int64 // 0: none
	now   func() time.Time
	file  BudgetFile

	mu    sync.Mutex
	day   int64
	spent int64
	ahead int64    // what the file says
	seen  []uint32 // the doorkeeper: fingerprints that asked once, by their low bits; made when saving begins

	saving sync.Mutex // held while the file is written; before mu
	failed bool       // the file could not be written the last time; guarded by saving
}

// BudgetFile keeps the count.
type BudgetFile interface {
	Load() (day, bytes int64, err error) // zeros when there is none
	Save(day, bytes int64) error         // durably
}

const (
	savingFrom  = 0.8
	budgetSteps = 64 // parts of the budget that are saved ahead
	doorkeepers = 1 << 16
)

// Charge is what was taken from the budget of a day.
type Charge struct{ Day, Bytes int64 }

// NewBudget makes a budget of so many bytes a day, 0 for no limit.
func NewBudget(daily int64, now func() time.Time, file BudgetFile) *Budget {
	b := &Budget{now: now, file: file}
	b.daily.Store(daily)
	return b
}

// Daily is how many bytes may be written in a day; 0: as many as come.
func (b *Budget) Daily() int64 { return b.daily.Load() }

// SetDaily changes how many. What a root without a budget wrote was not counted: the count goes on from the file.
func (b *Budget) SetDaily(daily int64) error {
	if b.daily.Load() == 0 && daily > 0 {
		if err := b.load(); err != nil {
			return err
		}
	}
	b.daily.Store(daily)
	return nil
}

// Load takes the count of an earlier run.
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

// turn begins a new day. The caller holds b.mu.
func (b *Budget) turn() {
	if day := b.now().Unix() / (24 * 60 * 60); day > b.day || day < b.day-1 {
		b.day, b.spent, b.ahead = day, 0, 0
	}
}

// Left says whether there is anything to spend, and plenty, whether there is enough to admit everything.
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

// Spent is what was counted today.
func (b *Budget) Spent() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	return b.spent
}

// Charge takes bytes from the budget. Near its end it does so only for an entry that continues one that is there, or
// that asks for the second time.
func (b *Budget) Charge(bytes int64, fingerprint uint64, continues func() bool) (c Charge, ok bool) {
	daily := b.daily.Load()
	if daily == 0 {
		return Charge{}, true
	}
	parent := continues() // it takes other locks
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

// Refund gives back what was charged and not written.
func (b *Budget) Refund(c *Charge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.Bytes > 0 && c.Day == b.day {
		b.spent = max(0, b.spent-c.Bytes)
	}
	*c = Charge{}
}

// Saved gives back what was charged for a piece and not written, because it was compressed. What was charged before
// midnight is given back to the next day.
func (b *Budget) Saved(bytes int64) {
	if bytes <= 0 || b.daily.Load() == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn()
	b.spent = max(0, b.spent-bytes)
}

// again says whether a fingerprint asked before, and notes it. The caller holds b.mu.
func (b *Budget) again(fingerprint uint64) bool {
	if b.seen == nil {
		b.seen = make([]uint32, doorkeepers)
	}
	at, is := &b.seen[fingerprint%doorkeepers], uint32(fingerprint>>32)|1
	before := *at == is
	*at = is
	return before
}

// Save keeps the file ahead of the count: by half a step when there is time for it (early), and else only when the
// count has reached the file's. The error is of the file.
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

// SaveExact writes the exact count, at the host's end.
func (b *Budget) SaveExact() error {
	if b.daily.Load() == 0 {
		return nil
	}
	b.saving.Lock()
	defer b.saving.Unlock()
	return b.save(0)
}

// save writes so much more than the count. The caller holds b.saving.
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
