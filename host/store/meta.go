package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// keep writes a file durably, unless it is there.
func (r *root) keep(dir, base string, data []byte) error {
	name := r.dir + "/" + dir + "/" + base
	if old, err := r.kept.Read(dir + "/" + base); err == nil && bytes.Equal(old, data) {
		return r.keepName(dir) // who wrote it may not have come to that
	}
	temp := r.store.tempName(name)
	err := r.writeMeta(temp, data)
	if err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		r.custody.discard(temp, int64(len(data)))
		return fmt.Errorf("store: root %s: keeping %s: %w", r.dir, dir, err)
	}
	return r.keepName(dir)
}

// catchUp writes the files of the catalog that the root lacks. The caller holds the catalog's Lock.
func (r *root) catchUp() error { return r.store.catalog.Files(r.keep) }

// sweepMeta removes temporaries that an earlier run left among the store's own files.
func (r *root) sweepMeta() {
	for _, d := range [...]string{pieceformat.MetaDir, pieceformat.NamespacesDir, pieceformat.PlansDir, pieceformat.PoliciesDir} {
		list, err := r.fs.ReadDir(r.dir + "/" + d)
		if err != nil {
			r.log.Warn("a directory could not be read; temporaries in it are left", "directory", d, "error", err)
		}
		for _, e := range list {
			if temp, ok := pieceformat.ParseTemp(e.Name()); ok && r.custody.ownsTemp(temp.Host) {
				if err := r.sweep(r.dir + "/" + d + "/" + e.Name()); err != nil {
					r.log.Warn("a temporary is left", "directory", d, "file", e.Name(), "error", err)
				}
			}
		}
	}
}

func (r *files) keepName(dir string) error {
	if err := r.fs.SyncDir(r.dir + "/" + dir); err != nil {
		return fmt.Errorf("store: root %s: keeping %s: %w: %w", r.dir, dir, ErrSync, err)
	}
	return nil
}

func (r *files) writeMeta(name string, data []byte) error {
	f, err := r.fs.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Datasync()
	}
	return errors.Join(err, f.Close())
}

// plan finds a plan by its digest, for pieces written under an earlier layout.
func (r *root) plan(d chunk.Digest) (*chunk.Plan, error) {
	s := r.store
	if p, ok := s.plans.Load(d); ok {
		return p.(*chunk.Plan), nil
	}
	b, err := r.kept.Read(pieceformat.PlansDir + "/" + d.String())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", pieceformat.ErrUnknownPlan, d)
	}
	if err != nil {
		return nil, err
	}
	p, err := chunk.DecodePlan(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", pieceformat.ErrUnknownPlan, d, err)
	}
	if p.Digest() != d {
		return nil, fmt.Errorf("%w: the file %s holds plan %s", pieceformat.ErrUnknownPlan, d, p.Digest())
	}
	s.plans.Store(d, p)
	return p, nil
}
