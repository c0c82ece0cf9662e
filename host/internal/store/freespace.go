package store

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// freeSpace watches what a root's file system has left.
type freeSpace struct{ *root }

// refresh measures what the file system has left when a put may not go by the last measurement.
func (r freeSpace) refresh() {
	if r.Account.Stale() {
		r.measure()
	}
}

// measure asks the file system what it has left.
func (r freeSpace) measure() {
	space, err := r.FS.Statfs(r.Path)
	if err != nil {
		return // the last measurement stands
	}
	r.Lock()
	defer r.Unlock()
	r.Account.Measured(space.Total, space.Available, r.Unwritten())
}

// full is called when the file system was full although the account had room.
func (r freeSpace) full(entry int64, cause error) {
	r.Lock()
	r.Account.Full(entry, r.Unwritten(), health.MaxPause*r.store.cfg.UpkeepEvery)
	r.Unlock()
	r.Health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// watch is the upkeep's part: it keeps the floor when others write, and tries whether there is room again.
func (r freeSpace) watch(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	if r.Account.Floor() {
		r.measure()
	}
	if r.Account.Retry() {
		r.Health.Promote(health.Full, health.In)
	}
	r.kind.shrink(ctx)
}
