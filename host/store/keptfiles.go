package store

// keptFiles are the files of the catalog that a store's roots hold.
type keptFiles struct{ *Store }

// Keep writes a file in every root that takes stores. One that stops taking stores meanwhile catches up before it does
// again.
func (k keptFiles) Keep(dir, base string, data []byte) error {
	if k.closed.Load() {
		return ErrClosed
	}
	for _, r := range k.roots {
		if !r.health.Takes() {
			continue
		}
		if err := r.keep(dir, base, data); err != nil && r.health.Takes() {
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
		if !incomplete && r.health.Takes() {
			r.custody.forget(r.dir + "/" + dir + "/" + base)
		}
	}
}
