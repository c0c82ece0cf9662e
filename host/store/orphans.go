package store

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/shared"
)

// An orphan is a file that nobody wants and that could not be unlinked. Its bytes stay in the root's account until it
// is gone. The upkeep tries again, and so does a root before it returns to service.
type orphan struct {
	name     string // empty: the place policy did not name the piece that follows
	class    *catalog.Class
	key      chunk.Key
	rank     uint32
	fallback bool
	bytes    int64
	credit   shared.Credit // of a shared root: what covers it

	deleting bool // guarded by orphans.mu, like the rest after the orphan is listed
}

// orphanKey is a file's name, or the piece that a file without one holds.
type orphanKey struct {
	name string
	key  chunk.Key
	rank uint32
}

func (o *orphan) at() orphanKey { return orphanKey{o.name, o.key, o.rank} }

// orphans are a root's. No file is touched and no policy called under its lock: an orphan that is being unlinked is
// marked, and only a put that needs its name waits for it.
type orphans struct {
	root  *root
	mu    sync.Mutex
	ended sync.Cond // on mu: an orphan is no longer being unlinked
	queue []*orphan // oldest first
	by    map[orphanKey][]*orphan
}

// maxOrphans bounds the memory: those beyond are in the account until the next start.
const maxOrphans = 1 << 16

func (l *orphans) init(r *root) {
	l.root, l.ended.L, l.by = r, &l.mu, map[orphanKey][]*orphan{}
}

// add is false when the list is full.
func (l *orphans) add(o *orphan) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= maxOrphans {
		return false
	}
	l.queue = append(l.queue, o)
	l.by[o.at()] = append(l.by[o.at()], o)
	return true
}

// forget takes an orphan off the list that is not in the queue. The caller holds l.mu.
func (l *orphans) forget(o *orphan) {
	at := o.at()
	if l.by[at] = slices.DeleteFunc(l.by[at], func(p *orphan) bool { return p == o }); len(l.by[at]) == 0 {
		delete(l.by, at)
	}
}

// take takes all orphans of one key off the list. It waits for those that are being unlinked.
func (l *orphans) take(at orphanKey) (list []*orphan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for slices.ContainsFunc(l.by[at], func(o *orphan) bool { return o.deleting }) {
		l.ended.Wait()
	}
	if list = l.by[at]; len(list) > 0 {
		delete(l.by, at)
		l.queue = slices.DeleteFunc(l.queue, func(o *orphan) bool { return slices.Contains(list, o) })
	}
	return list
}

// first marks the oldest orphan for its deletion; nil when there is none.
func (l *orphans) first() *orphan {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nil
	}
	o := l.queue[0]
	l.queue, o.deleting = l.queue[1:], true
	return o
}

// deleted ends the deletion of an orphan, which is the newest again if it failed.
func (l *orphans) deleted(o *orphan, failed error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.deleting = false; failed != nil {
		l.queue = append(l.queue, o)
	} else {
		l.forget(o)
	}
	l.ended.Broadcast()
}

func (l *orphans) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}

// has says whether a file waits for its deletion.
func (l *orphans) has(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.by[orphanKey{name: name}]) > 0
}

// cover leaves a put's credit with a file until that is deleted. It is false when it has been.
func (l *orphans) cover(name string, credit shared.Credit) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.by[orphanKey{name: name}]
	if len(list) == 0 {
		return false
	}
	list[0].credit = credit
	return true
}

// deferDelete notes a file for later. The caller books its bytes.
func (r *files) deferDelete(o *orphan) {
	if !r.orphans.add(o) && o.class != nil {
		o.class.Release()
	}
}

// deferDeleteUnnamed notes a piece that no policy names at the moment.
func (r *files) deferDeleteUnnamed(c *catalog.Class, k *chunk.Key, rank uint32, fallback bool) {
	if c.Acquire() {
		r.deferDelete(&orphan{class: c, key: *k, rank: rank, fallback: fallback, bytes: c.FileBytes()})
	}
}

// deferDeleteLate notes a name under which an operation that was abandoned may yet leave a file.
func (r *files) deferDeleteLate(name string, err error) {
	if health.Hung(err) {
		r.deferDelete(&orphan{name: name})
	}
}

// retry tries each orphan once more.
func (l *orphans) retry(ctx context.Context) {
	r := l.root
	for range l.len() {
		if ctx.Err() != nil || r.health.State() == health.Out || !l.retryOne() {
			return
		}
	}
}

// retryOne tries the oldest one. It is false when there is none.
func (l *orphans) retryOne() bool {
	r := l.root
	o := l.first()
	if o == nil {
		return false
	}
	name, err := o.name, error(nil)
	if o.class != nil {
		name, err = r.locatePiece(o.class, &o.key, o.rank, o.fallback)
	}
	if err == nil {
		if err = r.fs.Remove(name); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if l.deleted(o, err); err == nil {
		l.gone(o)
	}
	return true
}

// claim takes the orphans off the list that have a put's target for their name, or may have it, so that nobody
// unlinks what the put publishes. Their bytes stay booked until settle.
func (l *orphans) claim(p *Put) []*orphan {
	r := l.root
	list := l.take(orphanKey{name: p.target})
	for _, o := range l.take(orphanKey{key: p.key, rank: p.rank}) {
		if o.mayBe(p) {
			list = append(list, o)
		} else {
			r.deferDelete(o)
		}
	}
	return list
}

// mayBe says whether an orphan without a name is of a put's piece, and would have its name.
func (o *orphan) mayBe(p *Put) bool {
	if o.class.Namespace != p.class.Namespace || o.class.Group != p.class.Group {
		return false
	}
	if o.class.Place == p.class.Place {
		return true
	}
	name, err := p.root.path(o.class, &o.key, o.rank, false)
	return err != nil || name == p.target
}

// settle ends claimed orphans: a published piece has their name now, or else they are listed again.
func (l *orphans) settle(list []*orphan, published bool) {
	r := l.root
	for _, o := range list {
		if published {
			l.gone(o)
		} else {
			r.deferDelete(o)
		}
	}
}

// gone takes an orphan out of the account.
func (l *orphans) gone(o *orphan) {
	r := l.root
	if o.class != nil {
		o.class.Release()
	}
	r.custody.returned(o.credit) // first, so that the evictor sees rather more used than less
	r.Account.Remove(capacity.Orphans, o.bytes)
}
