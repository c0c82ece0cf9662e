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

// Orphan is a file that is not wanted and could not be unlinked. Its bytes stay in the root's account until it is
// gone. The upkeep tries again, and so does a root before it returns to service.
type Orphan struct {
	name    string
	bytes   int64
	gone    func() // called when it is gone; or nil
	renamed bool   // the name may be of another file than the one that is unwanted, which is only
	only    staging.Info

	// Guarded by Orphans.mu, like the rest after the orphan is listed.
	deleting bool // it is being unlinked
	claimed  bool // a put may be about to publish under its name
}

// Orphans are a root's. No file is touched under its lock: an orphan that is being unlinked is marked, and only a put that
// needs its name waits for it.
type Orphans struct {
	dir   *Dir
	mu    sync.Mutex
	ended sync.Cond            // on mu: an orphan is no longer being unlinked
	queue []*Orphan            // oldest first, without those that are being unlinked or are claimed
	by    map[string][]*Orphan // by name
}

// maxOrphans bounds the memory: those beyond are in the account until the next start.
const maxOrphans = 1 << 16

func (l *Orphans) init(d *Dir) {
	l.dir, l.ended.L, l.by = d, &l.mu, map[string][]*Orphan{}
}

// add takes no orphan when the list is full. The caller holds l.mu.
func (l *Orphans) add(o *Orphan) {
	if len(l.queue) < maxOrphans {
		l.queue = append(l.queue, o)
		l.by[o.name] = append(l.by[o.name], o)
	}
}

// forget takes an orphan off the list that is not in the queue. The caller holds l.mu.
func (l *Orphans) forget(o *Orphan) {
	if l.by[o.name] = slices.DeleteFunc(l.by[o.name], func(p *Orphan) bool { return p == o }); len(l.by[o.name]) == 0 {
		delete(l.by, o.name)
	}
}

// Claim keeps the orphans from being unlinked that have this name and no claim, so that what is published there is not
// unlinked. Their bytes stay booked until Settle. It waits for those that are being unlinked.
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
	for _, o := range l.by[name] {
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

// OnRemoval has gone called when an orphan is removed, before its bytes leave the account. It is false when it has been
// removed.
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

// later lists a file and books its bytes, which comes first: another may remove the file as soon as it is listed.
func (l *Orphans) later(o *Orphan) {
	l.dir.account.Add(capacity.Orphans, o.bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(o)
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

// Retry tries each orphan once more, until the process is short of something. It says whether any are left.
func (l *Orphans) Retry(ctx context.Context) (left bool) {
	for range l.len() {
		if ctx.Err() != nil || l.dir.Health.State() == health.Out || !l.retryOne() {
			break
		}
	}
	return l.len() > 0
}

// retryOne tries the oldest one. It is false when there is none, or the process is short of something.
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
	}
	return health.Judge(err) != health.Shortage
}

// unlink removes an orphan's file, and none but it.
func (l *Orphans) unlink(o *Orphan) error {
	if o.renamed {
		if now, err := l.dir.FS.Stat(o.name); err != nil || !now.Same(o.only) {
			return err
		}
	}
	return l.dir.remove(o.name)
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
	if o.gone != nil {
		o.gone()
	}
	l.dir.account.Remove(capacity.Orphans, o.bytes)
}
