package store

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/entries"
)

// How what a put promises is on disk: bytes and names under Strict, and under Batch what no later batch would tell of.

// lost says, where batches are to make pieces durable, that some of what was written since the put began may be lost,
// and that no later batch would tell.
func (p *Put) lost() error {
	r := p.root
	if r.store.cfg.Durability != Batch || p.unsure == r.batch.failed.Load() && p.outage == r.Health.Returns() {
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

// batch is what a root has published under [Batch] and not made durable yet.
type batch struct {
	marks
	failed atomic.Uint32 // batches that could not be made durable
}

// marks collects entries. It has its own lock, which is taken after the root's.
type marks struct {
	mu   sync.Mutex
	list []entries.Mark
}

func (m *marks) add(more ...entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = append(m.list, more...)
}

func (m *marks) take() (list []entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	list, m.list = m.list, nil
	return list
}

func (m *marks) len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.list)
}

// lostBatch takes the batch after a sync has failed, or the root was out. A put compares what it has seen and joins the batch
// under the root's lock, so a put that has not seen the failure is in it.
func (r *root) lostBatch() []entries.Mark {
	r.Lock()
	defer r.Unlock()
	return r.batch.take()
}

// flushEvery makes what was published durable, a batch at a time, and once more at the end. It ends with ctx.
func (r *root) flushEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			r.flush()
			return
		case <-tick.C:
			r.flush()
		}
	}
}

// flush makes one batch durable. When a sync fails, the bytes may not be on disk, and the batch's entries are dropped. The
// kernel reports the failure once and the next sync succeeds, so entries that were published during the sync are dropped
// too, and pieces that were being written are not published.
func (r *root) flush() {
	if !r.Health.Serves() {
		return // before it comes back, what is not durable goes
	}
	batch := r.batch.take()
	if len(batch) == 0 {
		return
	}
	err := r.FS.SyncFS(r.Path)
	if err == nil {
		return
	}
	err = r.SyncFailed(err)
	r.batch.failed.Add(1)
	batch = append(batch, r.lostBatch()...)
	r.Log.Error("a batch could not be made durable; its entries are dropped", "entries", len(batch), "error", err)
	for _, m := range batch {
		r.drop(m, 0)
	}
}
