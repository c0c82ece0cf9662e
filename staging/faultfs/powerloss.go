package faultfs

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// PowerLoss cuts the power. Every later operation fails with [ErrPowerLost], all locks are released, and the
// directories are reset to a state that depends on the seed. To continue, call [NewMachine] again. A second PowerLoss does
// nothing.
func (v *Machine) PowerLoss(seed uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.down {
		return nil
	}
	v.down = true
	rng := rand.New(rand.NewPCG(seed, 0x706f776572))
	var errs []error
	for l := range v.locks {
		errs = append(errs, l.(*crashLock).Closer.Close())
	}
	clear(v.locks)
	// Lose all, none or some: losing a little of much is as likely as losing everything.
	share := []float64{0, 0.02, 0.2, 1}
	errs = append(errs, v.loseNames(rng, share[rng.IntN(len(share))]))
	for _, k := range v.ordered() {
		errs = append(errs, v.losePages(k, rng, share[rng.IntN(len(share))]))
	}
	errs = append(errs, os.RemoveAll(v.trash))
	v.names, v.files = nil, nil
	return errors.Join(errs...)
}

// ordered lists the kept files in the order in which they were kept, so that a seed always has the same effect.
func (v *Machine) ordered() []*keptFile {
	var list []*keptFile
	for _, k := range v.files {
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b *keptFile) int {
		if len(a.link) != len(b.link) {
			return len(a.link) - len(b.link) // numbers: the shorter is the smaller
		}
		return slices.Compare([]byte(a.link), []byte(b.link))
	})
	return list
}

// loseNames undoes changes, the latest first. If a change in a directory is lost, all later ones there are lost too.
func (v *Machine) loseNames(rng *rand.Rand, share float64) (err error) {
	cut := map[string]bool{}
	var lost []*nameChange
	for _, c := range v.names {
		gone := rng.Float64() < share
		for _, d := range c.dirs {
			gone = gone || cut[d]
		}
		if !gone {
			continue
		}
		for _, d := range c.dirs {
			cut[d] = true
		}
		lost = append(lost, c)
	}
	for _, c := range slices.Backward(lost) {
		err = errors.Join(err, c.undo())
	}
	return err
}

// losePages restores the durable content of some pages, and perhaps the durable length.
func (v *Machine) losePages(k *keptFile, rng *rand.Rand, share float64) error {
	f, err := v.inner.OpenFile(k.link, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	size := info.Size
	if share > 0 && rng.IntN(2) == 0 {
		size = k.size
	}
	pages := make([]int64, 0, len(k.pages))
	for page := range k.pages {
		pages = append(pages, page)
	}
	slices.Sort(pages)
	for _, page := range pages {
		cut := page*staging.Align >= info.Size && page*staging.Align < size // by a truncation that is lost
		if rng.Float64() >= share && !cut {
			continue
		}
		old := make([]byte, staging.Align)
		copy(old, k.pages[page])
		if _, err := f.WriteAt(old, page*staging.Align); err != nil {
			return err
		}
	}
	return unix.Ftruncate(int(f.Fd()), size)
}
