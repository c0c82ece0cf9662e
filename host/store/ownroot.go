package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/files"
	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// ownRoot is the [custody] of a root that this host has for itself. Put and eviction settle everything here and now.
type ownRoot struct{ r *root }

var ownRules = rules{
	wholeEntries: true, evicts: true, awaits: true, reusesFiles: true, tempsBeside: true, forgets: true,
	ownsTemp: func(string) bool { return true },
}

func (c ownRoot) mayInsert(*Put) error   { return nil }
func (c ownRoot) giveBack(shared.Credit) {}
func (c ownRoot) grants() bool           { return true }
func (c ownRoot) leave()                 {}
func (c ownRoot) step(context.Context)   {}
func (c ownRoot) stats() *SharedStats    { return nil }

func (c ownRoot) temp(_ *Put, beside string) (string, error) { return beside, nil }
func (c ownRoot) guard(_ *Put, f staging.File) staging.File  { return f }

func (c ownRoot) reserve(ctx context.Context, w reservation) error { return w.evicting(ctx, c.r) }

func (c ownRoot) publish(p *Put, _ staging.Info) error {
	// Its directory may have gone since, if the put got another name.
	return c.r.InDir(p.target, func() error { return c.r.FS.RenameNoReplace(p.temp, p.target) })
}

func (c ownRoot) notPublished(p *Put, temp staging.Info, err, look error) {
	switch {
	case look != nil && !errors.Is(look, fs.ErrNotExist):
		c.r.Log.Error("publication failed, perhaps after the rename; will look again, its bytes stay in the account",
			"file", p.target, "error", err, "look", look)
		c.r.Orphans.AddRenamed(p.target, temp, pieceformat.Padded(temp.Allocated))
	case health.Hung(err):
		c.r.Orphans.AddRenamed(p.target, temp, 0)
	}
}

func (c ownRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	switch cause := fmt.Errorf("%w: key %s", pieceformat.ErrWrongPiece, h.Key); {
	case damage != nil:
		c.r.Quarantine.Isolate(p.target, damage)
	case p.name == "":
		c.r.Quarantine.Isolate(p.target, cause)
	default:
		return p.leaveName(cause)
	}
	return nil
}

func (c ownRoot) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	r := c.r
	for rank := range entries.Ranks(pieces) {
		n, err := r.Remove(r.victim(v, rank), v.Class.FileBytes())
		if errors.Is(err, fs.ErrNotExist) { // somebody has removed it
			r.Counted(&r.Count.Vanished)
			r.Quarantine.Recount()
		} else if err != nil {
			failed = err
		}
		left += n
	}
	return left, failed
}

func (c ownRoot) unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error) {
	r := c.r
	k, _ := r.Quarantine.Move(name, v.Class.FileBytes(), cause)
	_, _ = c.unlink(v, v.Pieces&^(1<<rank)) // it logs what fails, and retries
	r.Lock()
	n := min(k.Bytes, r.Index.Bytes(v.Slot)) // the entry's no more: the quarantine has them
	r.Index.Resize(v.Slot, -n)
	r.Account.Release(r.Index.Owner(v.Slot).Tenant, n)
	excess := r.Quarantine.Add(k)
	r.Unlock()
	r.Quarantine.Remove(excess)
}

func (c ownRoot) discard(name string, most int64) (left int64) { return c.r.Discard(name, most) }
func (c ownRoot) lockOut(context.Context) error                { return c.unshared() }
func (c ownRoot) identify() (empty bool, err error)            { return c.r.directory.Adopt() }
func (c ownRoot) judge() recovery.Judge                        { return recovery.Exclusive{} }

func (c ownRoot) recover(ctx context.Context) error {
	ok, err := c.r.recovery.TakeCheckpoint(ctx)
	if err != nil {
		return err
	}
	if !ok {
		return c.r.recovery.BeginScan()
	}
	c.r.shrink(ctx)
	close(c.r.scanned)
	return ctx.Err()
}

func (c ownRoot) scan(ctx context.Context) error {
	if err := c.r.recovery.Scan(ctx); err != nil {
		return err
	}
	c.r.shrink(ctx)
	return ctx.Err()
}

func (c ownRoot) start() {
	r, s := c.r, c.r.store
	s.work.Go(func() { r.recovery.SaveTouchesEvery(s.run, recovery.TouchesEvery) })
	if r.leaving.To != nil {
		s.work.Go(func() { r.leaving.Run(s.run) })
	}
	if r.inBackground() {
		s.work.Go(func() { r.evictAhead(s.run) })
	}
}

func (c ownRoot) save() {
	c.r.recovery.SaveTouches()
	c.r.recovery.SaveCheckpoint()
}

// unshared says who shares a root that this host wants for itself.
func (c ownRoot) unshared() error {
	entries, err := c.r.FS.ReadDir(c.r.Path + "/" + shared.Dir + "/hosts")
	if errors.Is(err, fs.ErrNotExist) || files.Misled(err) || err == nil && len(entries) == 0 {
		return nil
	} else if err != nil {
		return fmt.Errorf("store: root %s: %w", c.r.Path, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return fmt.Errorf("%w: %s is shared by %s: stop them, or set shared = true here too; "+
		"remove what is in %s/hosts of hosts that were killed",
		ErrRootBusy, c.r.Path, strings.Join(names, ", "), c.r.Path+"/"+shared.Dir)
}
