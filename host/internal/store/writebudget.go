package store

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// writeBudget is the daily write budget of a root.
type writeBudget struct {
	*capacity.Budget
	root *root
}

func newWriteBudget(r *root) writeBudget {
	file := budgetFile{Kept: r.kept, Name: r.file(pieceformat.WrittenFile)}
	return writeBudget{capacity.NewBudget(r.cfg.DailyWrites, r.store.cfg.Now, file), r}
}

// charge charges the budget for a piece or an entry. The root's lock must not be held.
func (b writeBudget) charge(p *Put, bytes int64, parent uint64) error {
	r := b.root
	c, ok := b.Charge(bytes, p.mark.Fingerprint, func() bool { return parent != 0 && holds(r.store.roots, parent, index.Live) })
	if ok {
		p.charge = c
		if c.Bytes > 0 {
			b.save(false)
		}
		return nil
	}
	r.Counted(&r.Count.OverBudget)
	r.store.count.refused.Add(1)
	if any, _ := b.Left(); any {
		return fmt.Errorf("%w: daily write budget of root %s (%d bytes) nearly exhausted: new prefixes are not admitted",
			ErrRefused, r.Path, b.Daily())
	}
	return fmt.Errorf("%w: daily write budget of root %s (%d bytes) exhausted", ErrRefused, r.Path, b.Daily())
}

// save keeps the budget's file ahead of its count.
func (b writeBudget) save(early bool) {
	if !b.root.Health.Takes() {
		return
	}
	if err := b.Save(early); err != nil {
		b.root.Log.Warn("write budget not saved: after a crash the count is too low", "error", err)
	}
}
