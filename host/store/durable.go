package store

import (
	"fmt"
	"path/filepath"
)

// How what a put promises is on disk: bytes and names under Strict, and under Batch what no later batch would tell of.

// lost says, where batches are to make pieces durable, that some of what was written since the put began may be lost,
// and that no later batch would tell.
func (p *Put) lost() error {
	r := p.root
	if r.store.cfg.Durability != Batch || p.unsure == r.unsure.Load() && p.outage == r.Health.Returns() {
		return nil
	}
	return fmt.Errorf("%w: a batch failed, or %s was out, while the piece was written", ErrSync, r.Path)
}

// strict says whether the piece is durable before it is resident. Under Batch a copy is, because what it is a copy of may
// have been, and goes.
func (p *Put) strict() bool {
	d := p.root.store.cfg.Durability
	return d == Strict || d == Batch && p.copy != nil
}

func (p *Put) syncName() error {
	if !p.strict() {
		return nil
	}
	err := p.root.SyncName(filepath.Dir(p.target))
	if err != nil {
		p.root.kind.discard(p.target, p.class.FileBytes())
	}
	return err
}
