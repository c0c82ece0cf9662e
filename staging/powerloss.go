package staging

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// PowerLoss ends the machine: every operation from now on fails with [ErrPowerLost], locks are gone, and the directories
// are what the next machine finds, as the seed has it. To go on, make another [Volatile]. A second call does nothing.
func (v *VolatileFS) PowerLoss(seed uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.down {
		return nil
	}
	v.down = true
	rng := rand.New(rand.NewPCG(seed, 0x706f776572))
	var errs []error
	for l := range v.locks {
		errs = append(errs, l.(*volatileLock).Closer.Close())
	}
	clear(v.locks)
	// All, none or some of what could be lost: a machine that loses little of much is as likely as one that loses all.
	share := []float64{0, 0.02, 0.2, 1}
	errs = append(errs, v.loseNames(rng, share[rng.IntN(len(share))]))
	for _, k := range v.ordered() {
		errs = append(errs, v.losePages(k, rng, share[rng.IntN(len(share))]))
	}
	errs = append(errs, os.RemoveAll(v.grave))
	v.names, v.files = nil, nil
	return errors.Join(errs...)
}

// ordered lists the kept files in the order in which they came, so that a seed always strikes alike.
func (v *VolatileFS) ordered() []*keptFile {
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

// loseNames takes changes back, the latest first: in a directory where one is lost all later ones are.
func (v *VolatileFS) loseNames(rng *rand.Rand, share float64) (err error) {
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

// losePages brings the durable content of some pages back, and perhaps the durable length.
func (v *VolatileFS) losePages(k *keptFile, rng *rand.Rand, share float64) error {
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
		cut := page*Align >= info.Size && page*Align < size // by a truncation that is lost
		if rng.Float64() >= share && !cut {
			continue
		}
		old := make([]byte, Align)
		copy(old, k.pages[page])
		if _, err := f.WriteAt(old, page*Align); err != nil {
			return err
		}
	}
	return unix.Ftruncate(int(f.Fd()), size)
}
