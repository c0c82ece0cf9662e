package store

import (
	"context"
	"errors"
	"math"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// A root that was out of service returns in the steps of [health.Monitor].Reopen. What its own part is stands here:
// files that could not be unlinked are removed, entries are dropped whose files gave no answer, and namespaces are kept
// that were opened meanwhile.

// notOfFile says that an error tells nothing about the file of a mark: the root is out, or was taken out for it. Nothing is
// promised of the entry while the root is out, and it is dropped before the root returns.
func (r *root) notOfFile(m entries.Mark, err error) bool {
	if health.Hung(err) {
		r.suspects.add(m)
		return true
	}
	return errors.Is(err, ErrRootOut)
}

// returning is a root on its way back. It implements [health.Root].
type returning struct{ *root }

// checkHealth is the upkeep's part: it notices that the directory is gone, and takes the root back.
func (r *root) checkHealth(ctx context.Context) {
	if r.Health.Serves() && !r.directory.Present() || r.Health.Takes() {
		return
	}
	r.Health.Check(ctx, returning{r})
}

// Probe implements [health.Root].
func (r returning) Probe() (empty bool, err error) {
	if r.unavailable.Load() {
		return false, nil // openLate looks at it as at a start
	}
	if empty, err = r.kind.identify(); err != nil {
		return false, err
	}
	return empty, r.directory.Probe(r.store.seq.TempName(r.Path + "/" + pieceformat.MetaDir + "/probe"))
}

// Reopen implements [health.Root].
func (r returning) Reopen(ctx context.Context, from health.State, empty bool) error {
	if r.unavailable.Load() {
		return r.openLate(ctx)
	}
	if from == health.Returning {
		if err := r.refit(ctx, empty); err != nil {
			return err
		}
	}
	return r.rejoin(ctx, from)
}

// refit brings the root up to date before it serves again.
func (r returning) refit(ctx context.Context, empty bool) error {
	r.ForgetDirs()
	lost := r.suspects.take()
	if empty {
		lost = r.Marks()
	}
	for i, m := range lost {
		if err := ctx.Err(); err != nil {
			r.suspects.add(lost[i:]...)
			return err
		}
		r.drop(m, 0)
	}
	if empty {
		r.Quarantine.Shrink(math.MaxInt64)
	}
	r.Orphans.Retry(ctx)
	return nil
}

// rejoin keeps what was opened meanwhile, and lets the root serve again before anything else can be opened.
func (r returning) rejoin(ctx context.Context, from health.State) error {
	if err := r.store.catalog.Lock(ctx); err != nil {
		return err
	}
	defer r.store.catalog.Unlock()
	if err := r.store.catalog.Files(r.kept.Keep); err != nil {
		return err
	}
	r.Account.Lift() // or it would be in service and refuse what does not fit in the place of something
	if !r.Health.Promote(from, health.In) {
		return ErrRootOut
	}
	countCopies(r.store) // what it has may have been stored elsewhere meanwhile
	return nil
}
