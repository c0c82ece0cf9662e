package files

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/staging"
)

// Orphan is an unwanted file that could not be unlinked. Its bytes stay in the root's account until it is gone. The upkeep
// tries again, and so does a root before it returns to service.
type Orphan struct {
	name    string
	bytes   int64
	gone    func() // called when the file is gone; may be nil
	renamed bool   // the name may belong to another file than the unwanted one, which only identifies
	only    staging.Info

	// The following fields, and all above once the orphan is listed, are guarded by Orphans.mu.
	deleting bool // being unlinked
	claimed  bool // a put may be about to publish under this name
}

// Orphans are the orphans of a root. No file is accessed under the lock: an orphan that is being unlinked is marked instead,
// and only a put that needs its name waits.
type Orphans struct {
	dir   *Dir
	mu    sync.Mutex
	ended sync.Cond            // on mu; signalled when an orphan is no longer being unlinked
	queue []*Orphan            // oldest first; without orphans that are being unlinked or are claimed
	by    map[string][]*Orphan // by name
}

// maxOrphans bounds the memory of the list. The bytes of further orphans are in the account until the next start.
const maxOrphans = 1 << 16

func (l *Orphans) init(d *Dir) {
	l.dir, l.ended.L, l.by = d, &l.mu, map[string][]*Orphan{}
}

// add adds an orphan unless the list is full. l.mu must be held.
func (l *Orphans) add(o *Orphan) {
	if len(l.queue) < maxOrphans {
		l.queue = append(l.queue, o)
		l.by[o.name] = append(l.by[o.name], o)
	}
}

// forget removes an orphan that is not in the queue from the list. l.mu must be held.
func (l *Orphans) forget(o *Orphan) {
	if l.by[o.name] = slices.DeleteFunc(l.by[o.name], func(p *Orphan) bool { return p == o }); len(l.by[o.name]) == 0 {
		delete(l.by, o.name)
	}
}

// Claim marks the orphans with this name, so that a file published under the name is not unlinked. Orphans that are claimed
// already are left out. Their bytes stay booked until Settle. It waits for orphans that are being unlinked.
func (l *Orphans) Claim(name string) (list []*Orphan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for slices.ContainsFunc(l.by[name], func(o *Orphan) bool { return o.deleting }) {
		l.ended.Wait()
	}
	for _, o := range l.by[name] {
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

// unclaim ends the claim of an orphan. Unless the orphan is gone, it goes to the end of the queue.
func (l *Orphans) unclaim(o *Orphan, gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.claimed = false; gone {
		l.forget(o)
	} else {
		l.queue = append(l.queue, o)
	}
}

// again lists a file of the given bytes that could not be unlinked. It books the bytes that no orphan with this name has
// booked yet, and returns them, since the same file may have failed before.
func (l *Orphans) again(name string, bytes int64) (more int64) {
	l.dir.account.Add(capacity.Orphans, bytes) // before another goroutine can remove the file
	if more = l.grow(name, bytes); more < bytes {
		l.dir.account.Remove(capacity.Orphans, bytes-more)
	}
	return more
}

func (l *Orphans) grow(name string, bytes int64) (more int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.by[name] {
		if !o.renamed {
			more = max(0, bytes-o.bytes)
			if o.bytes += more; o.deleting {
				l.dir.account.Leave(capacity.Orphans, more)
			}
			return more
		}
	}
	l.add(&Orphan{name: name, bytes: bytes})
	return bytes
}

// first marks the oldest orphan as being unlinked and returns it, or nil if there is none.
func (l *Orphans) first() *Orphan {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nil
	}
	o := l.queue[0]
	l.queue, o.deleting = l.queue[1:], true
	l.dir.account.Leave(capacity.Orphans, o.bytes)
	return o
}

// deleted ends the unlinking of an orphan. If it failed, the orphan goes to the end of the queue.
func (l *Orphans) deleted(o *Orphan, failed error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.deleting = false; failed != nil {
		l.queue = append(l.queue, o)
		l.dir.account.Leave(capacity.Orphans, -o.bytes)
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

// Has reports whether a file is an orphan, including one that a put has claimed. Such a file is already in the account.
func (l *Orphans) Has(name string) bool {
	l.mu.Lock()
	list := slices.Clone(l.by[name])
	l.mu.Unlock()
	return slices.ContainsFunc(list, func(o *Orphan) bool {
		if !o.renamed {
			return true
		}
		now, err := l.dir.FS.Stat(name)
		return err != nil || now.Same(o.only)
	})
}

// OnRemoval registers a function that is called when an orphan has been removed, before its bytes leave the account. It returns
// false if the orphan is already gone.
func (l *Orphans) OnRemoval(name string, gone func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.by[name]
	if len(list) == 0 {
		return false
	}
	list[0].gone = gone
	return true
}

// later lists an orphan and books its bytes. The bytes are booked first, since the file may be removed as soon as it is listed.
func (l *Orphans) later(o *Orphan) {
	l.dir.account.Add(capacity.Orphans, o.bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(o)
}

// AddLate lists a name under which an abandoned operation may still create a file. It ignores all errors other than a hang.
func (l *Orphans) AddLate(name string, err error) {
	if health.Hung(err) {
		l.later(&Orphan{name: name})
	}
}

// AddRenamed lists a name that a file may have got, or may still get, by a rename that reported an error. Any other file with
// that name is left alone.
func (l *Orphans) AddRenamed(name string, file staging.Info, bytes int64) {
	l.later(&Orphan{name: name, only: file, renamed: true, bytes: bytes})
}

// Retry tries to unlink each orphan once, until the process runs short of a resource. It reports whether any orphans are left.
func (l *Orphans) Retry(ctx context.Context) (left bool) {
	for range l.len() {
		if ctx.Err() != nil || l.dir.Health.State() == health.Out || !l.retryOne() {
			break
		}
	}
	return l.len() > 0
}

// retryOne tries to unlink the oldest orphan. It returns false if there is none or if the process is short of a resource.
func (l *Orphans) retryOne() bool {
	o := l.first()
	if o == nil {
		return false
	}
	err := l.unlink(o)
	if errors.Is(err, fs.ErrNotExist) || Misled(err) {
		l.dir.Quarantine.Recount()
		err = nil
	}
	if l.deleted(o, err); err == nil {
		l.removed(o)
		l.dir.account.Leave(capacity.Orphans, -o.bytes)
	}
	return health.Judge(err) != health.Shortage
}

// unlink removes the file of an orphan, and no other file with its name.
func (l *Orphans) unlink(o *Orphan) error {
	if o.renamed {
		if now, err := l.dir.FS.Stat(o.name); err != nil || !now.Same(o.only) {
			return err
		}
	}
	return l.dir.remove(o.name)
}

// Settle ends claims. With gone set, the orphans are removed from the list, because their name is free or belongs to a
// published piece now. Otherwise they are tried again.
func (l *Orphans) Settle(list []*Orphan, gone bool) {
	for _, o := range list {
		if l.unclaim(o, gone); gone {
			l.removed(o)
		}
	}
}

// removed removes an orphan's bytes from the account.
func (l *Orphans) removed(o *Orphan) {
	if o.gone != nil {
		o.gone()
	}
	l.dir.account.Remove(capacity.Orphans, o.bytes)
}
