package store

import (
	"context"
	"math"
	"time"

	"github.com/kvhost/kvhost/host/store/health"
)

// A root's capacity is what its owner allows. The file system may have less to give: because a part of it is to be left to
// others (min_free), or because it is full before the capacity is reached. Then the root takes what it can get, evicts for
// what it stores, and grows again when there is room.

// bounds are what a root may take for its file system's sake.
type bounds struct {
	free     int64     // by the last measurement; 0 before the first
	measured time.Time //
	ceiling  int64     // what was taken when the file system was full; 0: it is not
	until    time.Time // the ceiling is tried
}

// freshness is how old a measurement may be when a put goes by it. Others' writes of that time are not seen; the root's own
// are in its account.
const freshness = 100 * time.Millisecond

// limit is what the root may take at present. mu is held.
func (r *root) limit() int64 {
	limit := r.cfg.Capacity
	if !r.bounds.measured.IsZero() {
		limit = min(limit, r.bounds.free)
	}
	if !r.bounds.until.IsZero() {
		limit = min(limit, r.bounds.ceiling)
	}
	return limit
}

// floor says whether something is to be left free.
func (r *root) floor() bool { return r.cfg.MinFree > 0 || r.cfg.MinFreePart > 0 }

// measureNow measures when the last measurement is old. mu is not held.
func (r *root) measureNow() {
	if !r.floor() {
		return
	}
	r.mu.Lock()
	old := time.Since(r.bounds.measured) > freshness
	r.mu.Unlock()
	if old {
		r.measure()
	}
}

// measure asks the file system what it has left. What is reserved and not yet published counts as if nothing of it were
// there: the file system does not tell.
func (r *root) measure() {
	space, err := r.fs.Statfs(r.dir)
	if err != nil {
		return // the last one holds
	}
	keep := max(r.cfg.MinFree, int64(math.Ceil(r.cfg.MinFreePart*float64(space.Total))))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bounds.free = max(0, r.used-r.unwritten()+space.Available-keep)
	r.bounds.measured = time.Now()
}

// meetTheEnd is called when the file system was full although the account says that there is room. What is on disk now is
// the most that is to be had for a while; an entry may be tried, in case it was others that have let go of something.
func (r *root) meetTheEnd(entry int64, cause error) {
	r.mu.Lock()
	r.bounds.ceiling = max(entry, r.used-r.unwritten())
	r.bounds.until = time.Now().Add(health.MaxPause * r.store.cfg.UpkeepEvery)
	r.mu.Unlock()
	r.health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// unwritten is what is reserved for pieces that are not there, whether somebody is writing them or not. mu is held.
func (r *root) unwritten() (bytes int64) {
	for class, n := range r.x.MissingByClass() {
		bytes += n * r.store.spaces.class(class).fileBytes()
	}
	return bytes
}

// watchSpace is the upkeep's part: it keeps the floor when others write, and tries whether there is room again.
func (r *root) watchSpace(ctx context.Context) {
	if !r.health.Takes() {
		return
	}
	if r.floor() {
		r.measure()
	}
	r.mu.Lock()
	tried := !r.bounds.until.IsZero() && time.Now().After(r.bounds.until)
	if tried {
		r.bounds.until = time.Time{}
	}
	over := r.used > r.limit()
	r.mu.Unlock()
	if tried {
		r.health.Promote(health.Full, health.In)
	}
	if over {
		r.shrink(ctx)
	}
}
