package store

import "github.com/kvhost/kvhost/host/kv"

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
		if !r.recovery.incomplete.Load() && r.Health.Takes() {
			r.kind.forget(dir, base)
		}
	}
}

// plan finds a plan by its digest, for pieces written under an earlier layout.
func (r *root) plan(d kv.Digest) (*kv.Plan, error) {
	if p, ok := r.store.plans.Load(d); ok {
		return p.(*kv.Plan), nil
	}
	p, err := r.kept.Plan(d)
	if err == nil {
		r.store.plans.Store(d, p)
	}
	return p, err
}
