package store

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// newBudget returns the daily write budget of the root.
func (r *root) newBudget() *capacity.Budget {
	return capacity.NewBudget(r.cfg.DailyWrites, r.store.cfg.Now, budgetFile{Kept: r.kept, Name: r.file(pieceformat.WrittenFile)})
}

// chargeBudget charges the root's budget for a piece or an entry. The root's lock must not be held.
func (r *root) chargeBudget(p *Put, bytes int64, parent uint64) error {
	c, ok := r.budget.Charge(bytes, p.mark.Fingerprint, func() bool { return parent != 0 && holds(r.store.roots, parent, index.Live) })
	if ok {
		p.charge = c
		if c.Bytes > 0 {
			r.saveBudget(false)
		}
		return nil
	}
	r.Counted(&r.Count.OverBudget)
	r.store.count.refused.Add(1)
	if any, _ := r.budget.Left(); any {
		return fmt.Errorf("%w: daily write budget of root %s (%d bytes) nearly exhausted: new prefixes are not admitted",
			ErrRefused, r.Path, r.budget.Daily())
	}
	return fmt.Errorf("%w: daily write budget of root %s (%d bytes) exhausted", ErrRefused, r.Path, r.budget.Daily())
}

// saveBudget keeps the budget's file ahead of its count.
func (r *root) saveBudget(early bool) {
	if !r.Health.Takes() {
		return
	}
	if err := r.budget.Save(early); err != nil {
		r.Log.Warn("write budget not saved: after a crash the count is too low", "error", err)
	}
}
