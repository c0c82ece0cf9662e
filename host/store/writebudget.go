package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// budgetFile keeps the count of a root's [capacity.Budget]. It implements [capacity.BudgetFile].
type budgetFile struct {
	root *root
	name string
}

func (f budgetFile) Load() (day, bytes int64, err error) {
	text, err := f.root.kept.Read(f.name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	if day, bytes, err = pieceformat.DecodeWritten(text); err != nil {
		f.root.Log.Warn("write budget unreadable: today's count begins at 0", "file", f.name, "error", err)
		return 0, 0, nil
	}
	return day, bytes, nil
}

func (f budgetFile) Save(day, bytes int64) error {
	return f.root.kept.Replace(f.name, func(file staging.File) error {
		_, err := file.WriteAt(pieceformat.EncodeWritten(day, bytes), 0)
		return err
	})
}

// writeBudget is the daily budget of a root.
type writeBudget struct {
	*capacity.Budget
	root *root
}

func newWriteBudget(r *root) writeBudget {
	file := budgetFile{r, pieceformat.WrittenFile + r.rules.suffix}
	return writeBudget{capacity.NewBudget(r.cfg.DailyWrites, r.store.cfg.Now, file), r}
}

// charge takes the bytes of a piece or an entry from the budget. The caller does not hold the root's mu.
func (b writeBudget) charge(p *Put, bytes int64, parent uint64) error {
	r := b.root
	c, ok := b.Charge(bytes, p.mark.Fingerprint, func() bool { return parent != 0 && holds(r.store.roots, parent) })
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
			ErrRefused, r.Path, r.cfg.DailyWrites)
	}
	return fmt.Errorf("%w: daily write budget of root %s (%d bytes) exhausted", ErrRefused, r.Path, r.cfg.DailyWrites)
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

// saveExact writes the exact count. Nothing else uses the root any more.
func (b writeBudget) saveExact() error {
	if !b.root.Health.Takes() {
		return nil
	}
	return b.SaveExact()
}
