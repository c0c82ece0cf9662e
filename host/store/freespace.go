package store

import (
	"context"

	"github.com/kvhost/kvhost/host/store/health"
)

// freeSpace sees to what a root's file system has left.
type freeSpace struct{ *root }

// refresh measures what the file system has left when a put may not go by the last measurement.
func (r freeSpace) refresh() {
	if r.account.Stale() {
		r.measure()
	}
}

// measure asks the file system what it has left.
func (r freeSpace) measure() {
	space, err := r.fs.Statfs(r.dir)
	if err != nil {
		return // the last measurement stands
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.account.Measured(space.Total, space.Available, r.unwritten())
}

// full is called when the file system was full although the account had room.
func (r freeSpace) full(entry int64, cause error) {
	r.mu.Lock()
	r.account.Full(entry, r.unwritten(), health.MaxPause*r.store.cfg.UpkeepEvery)
	r.mu.Unlock()
	r.health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// unwritten is what is reserved for pieces that are not there, whether somebody is writing them or not. The caller
// holds mu.
func (r *entries) unwritten() (bytes int64) {
	for class, n := range r.x.MissingByClass() {
		bytes += n * r.store.catalog.Class(class).FileBytes()
	}
	return bytes
}

// watch is the upkeep's part: it keeps the floor when others write, and tries whether there is room again.
func (r freeSpace) watch(ctx context.Context) {
	if !r.health.Takes() {
		return
	}
	if r.account.Floor() {
		r.measure()
	}
	if r.account.Retry() {
		r.health.Promote(health.Full, health.In)
	}
	if r.account.Excess(1) > 0 {
		r.shrink(ctx)
	}
}
