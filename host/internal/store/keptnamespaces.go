package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// loadNamespaces gives the catalog the texts of namespaces that the root holds.
func (d *keptDir) loadNamespaces() error {
	for _, dir := range pieceformat.Copies(pieceformat.NamespacesDir) {
		list, err := d.FS.ReadDir(d.Slash + dir)
		if err != nil {
			return fmt.Errorf("store: root %s: %w", d.Path, err)
		}
		for _, e := range list {
			if digest, err := kv.ParseDigest(e.Name()); err == nil && !d.Catalog.Knows(digest) {
				d.loadNamespace(digest)
			}
		}
	}
	return nil
}

func (d *keptDir) loadNamespace(digest kv.Digest) {
	text, err := d.text(digest)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		d.Log.Error("namespace left out, its pieces are left alone; run fsck", "namespace", digest, "error", err)
	}
	d.Catalog.AddText(digest, string(text), err)
}

// readTries is how often a namespace's text is read, so that a transient error does not cost what is in the namespace.
const readTries = 3

// text reads the text of a namespace.
func (d *keptDir) text(digest kv.Digest) (text []byte, err error) {
	for range readTries {
		text, err = d.kept(pieceformat.NamespacesDir, digest.String(), func(b []byte) error {
			if kv.TextDigest(b) != digest {
				return fmt.Errorf("%w: its digest is another", pieceformat.ErrDamaged)
			}
			return nil
		})
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return text, err
}

// Plan reads the plan with a digest, for pieces written under an earlier layout.
func (d *keptDir) Plan(digest kv.Digest) (*kv.Plan, error) {
	var plan *kv.Plan
	_, err := d.kept(pieceformat.PlansDir, digest.String(), func(b []byte) error {
		p, err := kv.DecodePlan(b)
		switch {
		case err != nil:
			return fmt.Errorf("%w: %s: %w", pieceformat.ErrUnknownPlan, digest, err)
		case p.Digest() != digest:
			return fmt.Errorf("%w: the file %s holds plan %s", pieceformat.ErrUnknownPlan, digest, p.Digest())
		}
		plan = p
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %s", pieceformat.ErrUnknownPlan, digest)
	}
	return plan, err
}

// budgetFile keeps the count of a root's write budget. It implements [capacity.BudgetFile].
type budgetFile struct {
	Kept *keptDir
	Name string
}

// Load reads the count, zeros when there is none.
func (f budgetFile) Load() (day, bytes int64, err error) {
	text, err := f.Kept.Read(f.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	if day, bytes, err = pieceformat.DecodeWritten(text); err != nil {
		f.Kept.Log.Warn("write budget unreadable: today's count begins at 0", "file", f.Name, "error", err)
		return 0, 0, nil
	}
	return day, bytes, nil
}

// Save replaces the count.
func (f budgetFile) Save(day, bytes int64) error {
	return f.Kept.Replace(f.Name, func(file staging.File) error {
		_, err := file.WriteAt(pieceformat.EncodeWritten(day, bytes), 0)
		return err
	})
}
