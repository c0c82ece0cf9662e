package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// keptDir manages the store's own files in a root.
type keptDir struct {
	*files.Dir
	Catalog  *catalog.Catalog
	Sequence *files.Sequence
}

// Replace replaces a file. Content and name are durable when it returns.
func (d *keptDir) Replace(rel string, write func(staging.File) error) error {
	name := d.Slash + rel
	if err := pieceformat.ReplaceFile(d.FS, d.Sequence.TempName(name), name, true, write); err != nil {
		return err
	}
	return d.FS.SyncDir(d.Slash + pieceformat.MetaDir)
}

// Keep writes a file and its copy durably into a directory below the root, unless they exist with this content.
func (d *keptDir) Keep(dir, base string, data []byte) error {
	for _, dir := range pieceformat.Copies(dir) {
		if err := d.keep(dir, base, data); err != nil {
			return err
		}
	}
	return nil
}

func (d *keptDir) keep(dir, base string, data []byte) error {
	name := d.Slash + dir + "/" + base
	if old, _, err := d.Read(dir + "/" + base); err == nil && bytes.Equal(old, data) {
		return d.syncNames(dir) // its writer may have been killed before the names were durable
	}
	err := health.Clear(d.FS, name, false, d.Log)
	if err == nil {
		err = pieceformat.ReplaceFile(d.FS, d.Sequence.TempName(name), name, true, pieceformat.Holding(data))
	}
	if err != nil {
		return fmt.Errorf("store: root %s: keeping %s: %w", d.Path, dir, err)
	}
	return d.syncNames(dir)
}

// heal writes a file again if one of its two copies is missing or damaged.
func (d *keptDir) heal(dir string, digest kv.Digest, data []byte, bad error) {
	if data == nil || bad == nil {
		return
	}
	file := dir + "/" + digest.String()
	if !errors.Is(bad, fs.ErrNotExist) {
		d.Log.Warn("one of two copies cannot be read and is written again", "file", file, "error", bad)
	}
	if err := d.Keep(dir, digest.String(), data); err != nil {
		d.Log.Warn("there is one copy of two", "file", file, "error", err)
	}
}

func (d *keptDir) syncNames(dir string) error {
	if err := d.FS.SyncDir(d.Slash + dir); err != nil {
		return fmt.Errorf("store: root %s: keeping %s: %w: %w", d.Path, dir, files.ErrSync, err)
	}
	return nil
}

// loadNamespaces adds the texts of namespaces in the root to the catalog.
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

// readTries is the maximum number of times that a namespace's text is read, so that a temporary error does not lose the pieces
// of the namespace.
const readTries = 3

func (d *keptDir) loadNamespace(digest kv.Digest) {
	var text []byte
	var err error
	for range readTries {
		if text, err = d.Text(digest); text != nil || errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if d.heal(pieceformat.NamespacesDir, digest, text, err); text != nil {
		err = nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		d.Log.Error("namespace left out, its pieces are left alone; run fsck", "namespace", digest, "error", err)
	}
	d.Catalog.AddText(digest, string(text), err)
}

// Plan returns a plan of pieces that were written under an earlier layout.
func (d *keptDir) Plan(digest kv.Digest) (*kv.Plan, error) {
	if known, ok := d.Catalog.Plans.Load(digest); ok {
		return known.(*kv.Plan), nil
	}
	plan, b, err := d.Dir.Plan(digest)
	switch d.heal(pieceformat.PlansDir, digest, b, err); {
	case plan != nil:
		d.Catalog.Plans.Store(digest, plan)
		return plan, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %s", pieceformat.ErrUnknownPlan, digest)
	case pieceformat.IsDamage(err):
		return nil, fmt.Errorf("%w: %s: %v", pieceformat.ErrUnknownPlan, digest, err)
	}
	return nil, err
}

// budgetFile stores the count of a root's write budget. It implements [capacity.BudgetFile].
type budgetFile struct {
	Kept *keptDir
	Name string
}

// Load implements [capacity.BudgetFile]. It returns zeros if there is no count.
func (f budgetFile) Load() (day, bytes int64, err error) {
	text, _, err := f.Kept.Read(f.Name)
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

// Save implements [capacity.BudgetFile].
func (f budgetFile) Save(day, bytes int64) error {
	return f.Kept.Replace(f.Name, pieceformat.Holding(pieceformat.EncodeWritten(day, bytes)))
}

// saveState writes the state of an evict policy. when is the time of the checkpoint to which the state belongs.
func (d *keptDir) saveState(s policy.State, when int64) error {
	kept := pieceformat.State{Time: when, Slots: s.Slots, Format: s.Format, Data: s.Data}
	return d.Replace(pieceformat.StateFile, pieceformat.Holding(kept.Encode()))
}

// removeState removes the state of an earlier checkpoint. If it cannot be removed, its time shows that it does not belong to
// the next checkpoint.
func (d *keptDir) removeState() { _ = d.FS.Remove(d.Path + "/" + pieceformat.StateFile) }

// loadState reads the state that belongs to the checkpoint with a time. It returns the zero State if there is none.
func (d *keptDir) loadState(when int64) policy.State {
	var s pieceformat.State
	err := d.Open(pieceformat.StateFile, func(f staging.File, info staging.Info) (err error) {
		b := make([]byte, min(info.Size, pieceformat.MaxStateFile))
		if _, err = f.ReadAt(b, 0); err != nil {
			return err
		}
		if s, err = pieceformat.DecodeState(b); err == nil && s.Time != when {
			err = fmt.Errorf("%w: policy state of another checkpoint", pieceformat.ErrDamaged)
		}
		return err
	})
	if err == nil {
		return policy.State{Format: s.Format, Slots: s.Slots, Data: s.Data}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		d.Log.Warn("evict policy's state not used", "error", err)
	}
	return policy.State{}
}
