package store

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// quarantineShare is the divisor of a root's capacity that gives the most bytes of its quarantine.
const quarantineShare = 16

// file returns the name of one of the store's own files in the root. In a shared root each host has its own file.
func (r *root) file(base string) string {
	if r.cfg.Shared {
		return base + "." + r.store.cfg.HostID
	}
	return base
}

// ownsTemp reports whether a temporary of an earlier run of a host is this host's to remove.
func (r *root) ownsTemp(host string) bool { return !r.cfg.Shared || host == r.store.cfg.HostID }

// identify checks that the directory may be used, and reports whether it is empty. A shared root must be the one that this host
// has joined. A bucket is checked by requests, because its root and its temporaries exist without a server.
func (r *root) identify() (empty bool, err error) {
	if !r.cfg.Shared {
		empty, err = r.directory.Adopt()
	} else if err = r.directory.Same(); err != nil {
		err = fmt.Errorf("%w, and shared: restart kvhost to join it", err)
	}
	if err == nil && r.cfg.Remote {
		err = r.answers(r.file(pieceformat.ProbeFile))
	}
	return empty, err
}

// answers returns an error if the server of a bucket does not answer.
func (r *root) answers(probe string) error {
	bare, name := r.Health.Bare(), r.Slash+probe
	err := pieceformat.ReplaceFile(bare, r.store.seq.TempName(name), name, true, pieceformat.Holding([]byte("kvhost probe\n")))
	if err == nil {
		err = errors.Join(health.ReadThrough(bare, name, pieceformat.Page), bare.Remove(name))
	}
	return err
}

// forget removes a file of the catalog that this host does not need. In a shared root it does nothing, because another host may
// need the file. After a failure the next start tries again.
func (r *root) forget(dir, base string) {
	if r.cfg.Shared {
		return
	}
	for _, dir := range pieceformat.Copies(dir) {
		if err := r.FS.Remove(r.Slash + dir + "/" + base); err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.Log.Warn("file that nothing needs not removed; the next start tries again", "file", base, "error", err)
		}
	}
}

// wake wakes the goroutine that waits for a channel with a buffer of one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// invites reports whether new entries should be stored in the root.
func (r *root) invites() bool {
	_, plenty := r.budget.Left()
	return plenty && r.Health.State() == health.In
}

// path returns the path of a piece's file. An empty name stands for the built-in one.
func (r *root) path(name string, cl *catalog.Class, key *kv.Key, rank uint32) string {
	if name != "" {
		return r.Slash + name
	}
	var room [512]byte
	return string(cl.AppendBuiltin(append(room[:0], r.Slash...), key, rank))
}

// victim returns the path of the file of an evicted entry's piece.
func (r *root) victim(v *entries.Eviction, rank uint32) string {
	name, _ := pieceformat.NameOf(v.Names, rank)
	return r.path(name, v.Class, &v.Key, rank)
}

// metered returns a file with measured transfers if a decision depends on them: the choice of a root, or whether to compress.
func (r *root) metered(f staging.File) staging.File {
	if len(r.store.roots) < 2 && r.meter.gain == nil {
		return f
	}
	return r.meter.File(f)
}

// facts returns the facts about the root for the place policy.
func (r *root) facts(id int) abi.RootFacts {
	r.Lock()
	defer r.Unlock()
	a := r.Account.Figures()
	var flags uint32
	if left, _ := r.budget.Left(); left && r.Health.Takes() {
		flags = abi.RootWritable
	}
	return abi.RootFacts{
		ID: uint32(id), Flags: flags, Capacity: uint64(a.Capacity), Free: uint64(max(0, a.Limit-a.Used)),
		ReadBps: r.meter.Reads.BytesPerSecond(), WriteBps: r.meter.Writes.BytesPerSecond(),
	}
}

// A root belongs to one host, which holds the lock file and the directory's lock while it runs, or to several hosts. Each of
// these holds a lock file with its own name, which excludes a second host with that name. It holds the common lock file only
// while it joins. From then on, its directory among those of the hosts shows that it is present, even on other machines that
// locks may not reach.

// holds reports whether one of the roots that are in service has an entry in the given state.
func holds(roots []*root, fp uint64, state uint8) bool {
	for _, r := range roots {
		if !r.Health.Serves() {
			continue
		}
		r.Lock()
		there := r.Has(fp, state)
		r.Unlock()
		if there {
			return true
		}
	}
	return false
}

// isAllocating reports whether the index memory for another put of the given bytes is still being allocated.
func (r *root) isAllocating(bytes int64) bool {
	there, more := r.allocated()
	return more && r.Account.Figures().Used+bytes > there
}

// allocated returns the allocated memory, and whether more is being allocated.
func (r *root) allocated() (bytes int64, more bool) {
	if !r.cfg.Volatile {
		return 0, false
	}
	space, err := r.cfg.FS.Statfs(r.Path)
	if err != nil || space.Available == space.Free {
		return 0, false
	}
	return space.Total - space.Free + space.Available, true
}

// ready returns the bytes that the root can take now without an eviction.
func (r *root) ready() int64 {
	room := -r.Account.Excess(1)
	if there, more := r.allocated(); more {
		room = min(room, there-r.Account.Figures().Used)
	}
	return room
}

// evictPolicy takes a reference to a policy that is about to evict. nil stands for the built-in one.
func (s *Store) evictPolicy(h *policy.Handle) *evictor.Policy {
	if h == nil {
		h = policy.BuiltinHandle(abi.RoleEvict)
	} else {
		h.Acquire()
	}
	return &evictor.Policy{Handle: h, Since: s.cfg.Now()}
}

// tellRoots gives the place policy new facts.
func (s *Store) tellRoots() {
	facts := make([]abi.RootFacts, len(s.ours()))
	for i, r := range s.ours() {
		facts[i] = r.facts(i)
	}
	s.catalog.SetRoots(facts)
}

// factsEvery is the maximum age of the place policy's facts in nanoseconds.
const factsEvery = int64(time.Second)

// refreshFacts gives the place policy new facts if its facts are too old.
func refreshFacts(s *Store) {
	if now, last := int64(s.seq.Clock()), s.factsAt.Load(); len(s.roots) > 1 && now-last >= factsEvery &&
		s.factsAt.CompareAndSwap(last, now) {
		s.tellRoots()
	}
}
