package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/staging"
)

// A root that was taken out comes back in these steps, each of which puts it off when it fails:
//
//  1. Every operation that was given up has ended. So nothing that was begun before comes late: no rename under a name
//     that is in use again, no write.
//  2. The directory is the one it was: a probe writes a file in it, reads it back and removes it.
//  3. Files that could not be unlinked go, and entries whose files gave no answer; namespaces that were opened meanwhile
//     are kept.

// lookAfter is the upkeep's part: it notices that a directory is gone, and takes roots back.
func (r *root) lookAfter(ctx context.Context) {
	state := r.state()
	if state == RootIn || state == RootFull {
		r.present()
		return
	}
	h := &r.health
	h.mu.Lock()
	early := time.Now().Before(h.due)
	h.mu.Unlock()
	if early || r.watched.Stuck() > 0 || r.bare.Stuck() > 0 {
		return
	}
	if err := r.comeBack(ctx, state); err != nil {
		h.mu.Lock()
		h.postpone(r.store.cfg.UpkeepEvery)
		h.mu.Unlock()
		r.log.Debug("root is not taken back yet", "error", err)
	}
}

func (r *root) comeBack(ctx context.Context, state RootState) error {
	if r.away.Load() {
		return r.arrive(ctx)
	}
	empty, err := r.identify()
	if err == nil {
		err = r.probe()
	}
	if err != nil {
		return err
	}
	r.health.outages.Add(1)
	if state == RootReadOnly {
		return r.rejoin(ctx, RootReadOnly)
	}
	if !r.promote(RootOut, returning) {
		return ErrRootOut
	}
	if err = r.refit(ctx, empty); err == nil {
		err = r.rejoin(ctx, returning)
	}
	r.health.state.CompareAndSwap(uint32(returning), uint32(RootOut))
	return err
}

// present says whether the root's directory is still there, and takes the root out when it is not.
func (r *root) present() bool {
	now, err := r.bare.Stat(r.dir)
	switch {
	case errors.Is(err, staging.ErrHung):
		r.saw(staging.OpStat, r.dir, err)
	case errors.Is(err, fs.ErrNotExist):
		r.takeOut("its directory is gone", err, "make the directory, or mount it, and kvhost goes on with what is there")
	case err == nil && !now.Same(r.self):
		err = fmt.Errorf("inode %d of device %#x, was %d of %#x", now.Ino, now.Dev, r.self.Ino, r.self.Dev)
		r.takeOut("another directory stands at its path", err, "mount the root's file system again, or restart kvhost to use what is there")
	default:
		return err == nil
	}
	return false
}

// identify says whether the directory is the one it was. One that was made anew on the same file system is taken, and
// is empty; one on another file system only when it has the root's lock file: else it is the mount point of something
// that is not mounted, and filling it would fill what is under it.
func (r *root) identify() (empty bool, err error) {
	now, err := r.bare.Stat(r.dir)
	if err != nil || now.Same(r.self) {
		return false, err
	}
	if r.cfg.Shared {
		return false, fmt.Errorf("%w: %s is another directory than it was, and shared: restart kvhost to join it", ErrRootOut, r.dir)
	}
	_, err = r.bare.Stat(r.lockName())
	empty = errors.Is(err, fs.ErrNotExist)
	switch {
	case err != nil && !empty:
		return false, err
	case empty && now.Dev != r.self.Dev:
		return false, fmt.Errorf("%w: %s is on another file system and has never been a root", ErrRootOut, r.dir)
	}
	for _, d := range ownDirs {
		if err := r.bare.MkdirAll(r.dir+"/"+d, 0o700); err != nil {
			return false, err
		}
	}
	lock, err := r.bare.Lock(r.lockName())
	if err != nil {
		return false, err
	}
	r.mu.Lock()
	old := r.lock
	r.lock, r.self = lock, now
	r.mu.Unlock()
	_ = old.Close() // of a file that is gone, or on a file system that is
	return empty, nil
}

// probe writes a page, reads it back, and removes it. A file system that is full, but else in order, passes.
func (r *root) probe() error {
	name := tempName(r.dir+"/"+metaDir+"/probe", r.store.cfg.HostID, r.store.seq.Add(1))
	f, err := r.bare.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if isFull(err) {
		return nil
	}
	if err != nil {
		return err
	}
	page, got := bytes.Repeat([]byte("kvhost probe\n"), 300), make([]byte, 3900)
	_, err = f.WriteAt(page, 0)
	if err == nil {
		err = f.Datasync()
	}
	if err == nil {
		if _, err = f.ReadAt(got, 0); err == nil && !bytes.Equal(page, got) {
			err = fmt.Errorf("%w: %s reads back as something else", ErrDamaged, name)
		}
	}
	if isFull(err) {
		err = nil
	}
	return errors.Join(err, f.Close(), r.bare.Remove(name))
}

// refit brings the root up to date before it serves again.
func (r *root) refit(ctx context.Context, empty bool) error {
	r.lasting.Clear()
	r.lastingN.Store(0)
	r.mu.Lock()
	lost := r.unsynced // what a sync would say of them now proves nothing
	r.unsynced = nil
	if empty {
		lost = lost[:0]
		r.x.Each(func(slot uint32, e *index.Entry) {
			if !e.Is(index.Evicting) {
				lost = append(lost, mark{slot, r.x.Fingerprint(slot)})
			}
		})
	}
	r.mu.Unlock()
	for _, m := range append(lost, r.health.takeSuspects()...) {
		if err := ctx.Err(); err != nil {
			r.suspect(m)
			return err
		}
		r.drop(m, 0)
	}
	if empty {
		r.mu.Lock()
		r.purge(r.quar.bytes)
		r.mu.Unlock()
	}
	r.retryDeletes(ctx)
	return nil
}

// rejoin keeps what was opened meanwhile, and lets the root serve again before anything else can be opened.
func (r *root) rejoin(ctx context.Context, from RootState) error {
	if err := r.store.opening.lock(ctx); err != nil {
		return err
	}
	defer r.store.opening.unlock()
	if err := r.catchUp(); err != nil {
		return err
	}
	if !r.promote(from, RootIn) {
		return ErrRootOut
	}
	return nil
}
