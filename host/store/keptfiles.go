package store

import (
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// keptFiles are the files of the catalog that a store's roots hold.
type keptFiles struct{ *Store }

// Keep writes a file in every root that takes stores. One that stops taking stores meanwhile catches up before it does
// again.
func (k keptFiles) Keep(dir, base string, data []byte) error {
	if k.closed.Load() {
		return ErrClosed
	}
	for _, r := range k.roots {
		if !r.Health.Takes() {
			continue
		}
		if err := r.kept.Keep(dir, base, data); err != nil && r.Health.Takes() {
			return err
		}
	}
	return nil
}

// Forget removes a file from the roots, except where a scan could not read files that may need it.
func (k keptFiles) Forget(dir, base string) {
	for _, r := range k.roots {
		r.Lock()
		incomplete := r.scanIncomplete
		r.Unlock()
		if !incomplete && r.Health.Takes() {
			r.custody.forget(r.Path + "/" + dir + "/" + base)
		}
	}
}

// sweepMeta removes temporaries that an earlier run left among the store's own files.
func (r *root) sweepMeta() {
	for _, d := range [...]string{pieceformat.MetaDir, pieceformat.NamespacesDir, pieceformat.PlansDir, pieceformat.PoliciesDir} {
		list, err := r.FS.ReadDir(r.Path + "/" + d)
		if err != nil {
			r.Log.Warn("a directory could not be read; temporaries in it are left", "directory", d, "error", err)
		}
		for _, e := range list {
			if temp, ok := pieceformat.ParseTemp(e.Name()); ok && r.custody.ownsTemp(temp.Host) {
				if err := r.sweep(r.Path + "/" + d + "/" + e.Name()); err != nil {
					r.Log.Warn("a temporary is left", "directory", d, "file", e.Name(), "error", err)
				}
			}
		}
	}
}

// plan finds a plan by its digest, for pieces written under an earlier layout.
func (r *root) plan(d chunk.Digest) (*chunk.Plan, error) {
	if p, ok := r.store.plans.Load(d); ok {
		return p.(*chunk.Plan), nil
	}
	p, err := r.kept.Plan(d)
	if err == nil {
		r.store.plans.Store(d, p)
	}
	return p, err
}
