package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// How what a put promises is on disk: bytes and names under Strict, and under Batch what no later batch would tell of.

// lost says, where batches are to make pieces durable, that some of what was written since the put began may be lost,
// and that no later batch would tell.
func (p *Put) lost() error {
	r := p.root
	if r.store.cfg.Durability != Batch || p.unsure == r.unsure.Load() && p.outage == r.health.Returns() {
		return nil
	}
	return fmt.Errorf("%w: a batch failed, or %s was out, while the piece was written", ErrSync, r.dir)
}

// syncOther makes the bytes of a piece durable that somebody else has written: a host, perhaps, that syncs nothing.
func (p *Put) syncOther() error {
	r := p.root
	if r.store.cfg.Durability != Strict {
		return nil
	}
	f, err := r.fs.OpenFile(p.target, os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("store: publishing %s, where the same piece stands: %w", p.target, err)
	}
	defer f.Close()
	if err := f.Datasync(); err != nil {
		return r.syncFailed(err)
	}
	return nil
}

func (p *Put) syncName() error {
	if p.root.store.cfg.Durability != Strict {
		return nil
	}
	dir := filepath.Dir(p.target)
	err := p.root.fs.SyncDir(dir)
	if err != nil {
		err = p.root.syncFailed(err)
	} else {
		err = p.root.settleDir(dir)
	}
	if err != nil {
		p.root.custody.discard(p.target, p.class.FileBytes())
	}
	return err
}

// maxLasting is how many directories are remembered as durable.
const maxLasting = 1 << 16

// makeDir makes a directory below the root, and under Strict the names of all levels durable.
func (r *files) makeDir(dir string) error {
	if r.store.cfg.Durability != Strict {
		return r.fs.MkdirAll(dir, 0o700)
	}
	for d := dir; len(d) > len(r.dir); d = filepath.Dir(d) {
		if _, err := r.fs.Stat(d); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		r.lasting.Delete(d) // somebody has removed it, and its name is a new one
	}
	if err := r.fs.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return r.settleDir(dir)
}

// settleDir makes the names of a directory and of those above it durable, unless this process has seen to it. Those
// that were there may have been made by a process that was killed, or by a put that has not come to that.
func (r *files) settleDir(dir string) error {
	for d := dir; len(d) > len(r.dir); d = filepath.Dir(d) {
		if _, ok := r.lasting.Load(d); ok {
			continue
		}
		if err := r.fs.SyncDir(filepath.Dir(d)); err != nil {
			return r.syncFailed(err)
		}
		if r.lastingN.Add(1) > maxLasting { // a place policy may make as many as it likes
			r.lasting.Clear()
			r.lastingN.Store(0)
		}
		r.lasting.Store(d, struct{}{})
	}
	return nil
}

func (r *files) syncFailed(cause error) error {
	r.syncFails.Add(1)
	return fmt.Errorf("%w: %w", ErrSync, cause)
}
