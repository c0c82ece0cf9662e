package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Orphan is a file that nobody wants and that could not be unlinked. Its bytes stay in the root's account until it is
// gone. The upkeep tries again, and so does a root before it returns to service.
type Orphan struct {
	name     string // empty: nobody can tell yet where the piece that follows stands
	class    *catalog.Class
	key      chunk.Key
	rank     uint32
	fallback bool
	bytes    int64
	gone     func() // called when it is gone; or nil
	renamed  bool   // the name may be of another file than the one that is unwanted, which is only
	only     staging.Info

	// Guarded by Orphans.mu, like the rest after the orphan is listed.
	deleting bool // it is being unlinked
	claimed  bool // a put may be about to publish under its name
	lost     bool // nothing stands where the policy says: who goes through all files meets it, or it is gone
	sought   bool // it has no name, and those who go through all files have not met it
}

// orphanKey is a file's name, or the piece that a file without one holds.
type orphanKey struct {
	name      string
	namespace chunk.Digest
	group     uint32
	key       chunk.Key
	rank      uint32
}

func (o *Orphan) at() orphanKey {
	if o.name != "" {
		return orphanKey{name: o.name}
	}
	return orphanKey{namespace: o.class.Namespace.Digest, group: o.class.Group, key: o.key, rank: o.rank}
}

// Orphans are a root's. No file is touched and no policy called under its lock: an orphan that is being unlinked is
// marked, and only a put that needs its name waits for it. While the list has a piece without a name, the piece is not
// stored again in this root: so every file that holds it is the orphan's.
type Orphans struct {
	dir   *Dir
	mu    sync.Mutex
	ended sync.Cond // on mu: an orphan is no longer being unlinked
	queue []*Orphan // oldest first, without those that are being unlinked or are claimed
	by    map[orphanKey][]*Orphan
}

// maxOrphans bounds the memory: those beyond are in the account until the next start.
const maxOrphans = 1 << 16

func (l *Orphans) init(d *Dir) {
	l.dir, l.ended.L, l.by = d, &l.mu, map[orphanKey][]*Orphan{}
}

// add is false when the list is full. The caller holds l.mu.
func (l *Orphans) add(o *Orphan) bool {
	if len(l.queue) >= maxOrphans {
		return false
	}
	l.queue = append(l.queue, o)
	l.by[o.at()] = append(l.by[o.at()], o)
	return true
}

// forget takes an orphan off the list that is not in the queue. The caller holds l.mu.
func (l *Orphans) forget(o *Orphan) {
	at := o.at()
	if l.by[at] = slices.DeleteFunc(l.by[at], func(p *Orphan) bool { return p == o }); len(l.by[at]) == 0 {
		delete(l.by, at)
	}
}

// claim claims all orphans of one key that nobody has claimed. It waits for those that are being unlinked.
func (l *Orphans) claim(at orphanKey) (list []*Orphan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for slices.ContainsFunc(l.by[at], func(o *Orphan) bool { return o.deleting }) {
		l.ended.Wait()
	}
	for _, o := range l.by[at] {
		if !o.claimed {
			o.claimed = true
			list = append(list, o)
		}
	}
	if len(list) > 0 {
		l.queue = slices.DeleteFunc(l.queue, func(o *Orphan) bool { return o.claimed })
	}
	return list
}

// unclaim ends the claim of an orphan, which is the newest again unless it is gone.
func (l *Orphans) unclaim(o *Orphan, gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.claimed = false; gone {
		l.forget(o)
	} else {
		l.queue = append(l.queue, o)
	}
}

// again lists a file that could not be unlinked and takes so many bytes. It books those that no orphan of its name has in
// the account yet, and returns them: the same file may have been left before.
func (l *Orphans) again(name string, bytes int64) (more int64) {
	l.dir.account.Add(capacity.Orphans, bytes) // before another can remove the file
	if more = l.grow(name, bytes); more < bytes {
		l.dir.account.Remove(capacity.Orphans, bytes-more)
	}
	return more
}

func (l *Orphans) grow(name string, bytes int64) (more int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.by[orphanKey{name: name}] {
		if !o.renamed {
			more = max(0, bytes-o.bytes)
			o.bytes += more
			return more
		}
	}
	l.add(&Orphan{name: name, bytes: bytes})
	return bytes
}

// first marks the oldest orphan for its deletion; nil when there is none.
func (l *Orphans) first() *Orphan {
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
func (l *Orphans) deleted(o *Orphan, failed error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.deleting = false; failed != nil {
		l.queue = append(l.queue, o)
	} else {
		l.forget(o)
	}
	l.ended.Broadcast()
}

func (l *Orphans) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}

// Has says whether a file is an orphan, also while a put has claimed it: what stands there is in the account.
func (l *Orphans) Has(name string) bool {
	l.mu.Lock()
	list := slices.Clone(l.by[orphanKey{name: name}])
	l.mu.Unlock()
	return slices.ContainsFunc(list, func(o *Orphan) bool {
		if !o.renamed {
			return true
		}
		now, err := l.dir.FS.Stat(name)
		return err != nil || now.Same(o.only)
	})
}

// OnRemoval has gone called when an orphan is removed, before its bytes leave the account. It is false when it has been
// removed.
func (l *Orphans) OnRemoval(name string, gone func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.by[orphanKey{name: name}]
	if len(list) == 0 {
		return false
	}
	list[0].gone = gone
	return true
}

// later lists a file and books its bytes, which comes first: another may remove the file as soon as it is listed.
func (l *Orphans) later(o *Orphan) {
	l.dir.account.Add(capacity.Orphans, o.bytes)
	l.mu.Lock()
	listed := l.add(o)
	l.mu.Unlock()
	if !listed && o.class != nil {
		o.class.Release()
	}
}

// AddUnnamed lists a piece that no policy names now.
func (l *Orphans) AddUnnamed(c *catalog.Class, k *chunk.Key, rank uint32, fallback bool) {
	if c.Acquire() {
		l.later(&Orphan{class: c, key: *k, rank: rank, fallback: fallback, bytes: c.FileBytes()})
	}
}

// AddLate lists a name under which an operation that was abandoned may yet leave a file. Any other error is ignored.
func (l *Orphans) AddLate(name string, err error) {
	if health.Hung(err) {
		l.later(&Orphan{name: name})
	}
}

// AddRenamed lists a name that a file may have got, or may yet get, in a rename that reported an error. Any other file
// of that name is left alone.
func (l *Orphans) AddRenamed(name string, file staging.Info, bytes int64) {
	l.later(&Orphan{name: name, only: file, renamed: true, bytes: bytes})
}

// Retry tries each orphan once more.
func (l *Orphans) Retry(ctx context.Context) {
	for range l.len() {
		if ctx.Err() != nil || l.dir.Health.State() == health.Out || !l.retryOne() {
			return
		}
	}
}

// retryOne tries the oldest one. It is false when there is none.
func (l *Orphans) retryOne() bool {
	o := l.first()
	if o == nil {
		return false
	}
	name, err := l.locate(o)
	if err == nil {
		l.mu.Lock()
		l.named(o, name) // who publishes there waits
		l.mu.Unlock()
		if err = l.unlink(o, name); errors.Is(err, fs.ErrNotExist) || Misled(err) {
			err = nil
		}
	}
	if l.deleted(o, err); err == nil {
		l.removed(o)
	}
	return true
}

// unlink removes an orphan's file, and none but it.
func (l *Orphans) unlink(o *Orphan, name string) error {
	if o.renamed {
		if now, err := l.dir.FS.Stat(name); err != nil || !now.Same(o.only) {
			return err
		}
	}
	return l.dir.FS.Remove(name)
}

// locate is where an orphan's file stands. The error says that nobody can tell now.
func (l *Orphans) locate(o *Orphan) (string, error) {
	if o.name != "" {
		return o.name, nil
	}
	name, err := l.dir.Locate(o.class, &o.key, o.rank, o.fallback)
	if err != nil {
		return "", err
	}
	h, _, err := l.dir.Look(name)
	switch {
	case err == nil && o.class.IsPiece(&h, &o.key, o.rank) || pieceformat.IsDamage(err):
		return name, nil // or a damaged file, which is of no use to anybody
	case err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, staging.ErrNotRegular) || Misled(err):
		l.mu.Lock()
		defer l.mu.Unlock()
		o.lost = true
		return "", fmt.Errorf("%w: rank %d of chunk %s is not at %s", errLost, o.rank, o.key, name)
	}
	return "", err
}

// named gives an orphan its name, by which it is listed from now on. The caller holds l.mu.
func (l *Orphans) named(o *Orphan, name string) {
	l.forget(o)
	o.name = name
	l.by[o.at()] = append(l.by[o.at()], o)
}

// Claim keeps the orphans from being unlinked that have this name, so that nobody unlinks what is published there. Their
// bytes stay booked until Settle. An older file of the piece gets its name first; the error says that nobody can tell it
// now, so that nothing may be published.
func (l *Orphans) Claim(name string, c *catalog.Class, k *chunk.Key, rank uint32) ([]*Orphan, error) {
	var failed error
	for _, o := range l.claim(orphanKey{namespace: c.Namespace.Digest, group: c.Group, key: *k, rank: rank}) {
		at, err := l.locate(o)
		if err == nil {
			l.mu.Lock()
			l.named(o, at)
			l.mu.Unlock()
		} else {
			failed = fmt.Errorf("an older file of the piece is not unlinked yet: %w", err)
		}
		l.unclaim(o, false)
	}
	if failed != nil {
		return nil, failed
	}
	return l.claim(orphanKey{name: name}), nil
}

// Met says whether what stands under a name is the file of an orphan that has none. It gets this one.
func (l *Orphans) Met(name string, h *pieceformat.Header) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.by[orphanKey{namespace: h.Namespace, group: h.Group, key: h.Key, rank: h.Rank}]
	if len(list) == 0 {
		return false
	}
	o := list[0]
	if o.sought = false; !o.deleting && !o.claimed { // else somebody else is looking for its name
		l.named(o, name)
	}
	return true
}

// Seek begins a way through all files, which meets the orphans that have no name.
func (l *Orphans) Seek() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.queue {
		o.sought = o.name == ""
	}
}

// Sought ends it. Nothing was left out: the files of those that were not met are gone.
func (l *Orphans) Sought() {
	var gone []*Orphan
	l.mu.Lock()
	l.queue = slices.DeleteFunc(l.queue, func(o *Orphan) bool {
		over := o.sought && o.name == ""
		if over {
			l.forget(o)
			gone = append(gone, o)
		}
		return over
	})
	l.mu.Unlock()
	for _, o := range gone {
		l.removed(o)
	}
}

// Lost says whether only a way through all files can find an orphan whose name was a place policy's.
func (l *Orphans) Lost(g *catalog.PlaceGeneration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.queue, func(o *Orphan) bool {
		return o.name == "" && o.class.Place == g && (o.lost || g.Policy.Quarantined())
	})
}

// Settle ends claims. With gone the orphans are over: a published piece has their name now, or it is free. Else they are
// tried again.
func (l *Orphans) Settle(list []*Orphan, gone bool) {
	for _, o := range list {
		if l.unclaim(o, gone); gone {
			l.removed(o)
		}
	}
}

// removed takes an orphan out of the account.
func (l *Orphans) removed(o *Orphan) {
	if o.class != nil {
		o.class.Release()
	}
	if o.gone != nil {
		o.gone()
	}
	l.dir.account.Remove(capacity.Orphans, o.bytes)
}
