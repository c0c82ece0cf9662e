package store

import (
	"context"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// custody is what differs between a root that this host has for itself ([ownRoot]) and one that several hosts share
// ([sharedRoot]). Nothing else asks which of the two a root is.
type custody interface {
	putCustody
	removalCustody
	rootCustody
}

// rules are the part of a custody that never changes.
type rules struct {
	suffix       string // ends the names of files of which each host has its own
	wholeEntries bool   // a new entry gets the bytes of all its ranks; otherwise each piece gets its own
	evicts       bool   // this host's puts evict, and keep the root within its limit
	awaits       bool   // a put waits for the removal of its key's entry; otherwise it is refused
	reusesFiles  bool   // puts can overwrite the files of victims
	tempsBeside  bool   // temporaries stand beside their targets, in directories that puts make
	forgets      bool   // the store's own files that this host has no use for are removed
	// ownsTemp says whether a temporary of an earlier run is this host's to remove.
	ownsTemp func(host string) bool
}

// putCustody is the part in a put.
type putCustody interface {
	// reserve books what a put needs.
	reserve(ctx context.Context, w reservation) error
	// mayInsert says why a put cannot make its entry now, if so. The root's lock is held.
	mayInsert(p *Put) error
	// temp is the name of a put's temporary, given the one that it would have beside its target.
	temp(p *Put, beside string) (string, error)
	// guard makes a put's file one that fails once the put may not write any more.
	guard(p *Put, f staging.File) staging.File
	// publish gives a temporary its name, which it then has alone.
	publish(p *Put, info staging.Info) error
	// notPublished judges an error of publish that did not come from another file under the name. look is the error of
	// the look at the name that followed: unless it is nil or fs.ErrNotExist, the temporary may have its name now.
	notPublished(p *Put, temp staging.Info, err, look error)
	// nameTaken frees a put's name or finds another one; what holds the name is damaged, or a piece of another key.
	nameTaken(p *Put, h *pieceformat.Header, damage error) error
	// giveBack returns credit: nothing that was written on it is on the disk any more.
	giveBack(credit shared.Credit)
}

// removalCustody is the part in removals.
type removalCustody interface {
	// unlink removes files of an evicted entry and returns the bytes of those that are left, and why.
	unlink(v *entries.Eviction, pieces uint64) (left int64, failed error)
	// unlinkDamaged removes an evicted entry's files, one of which is damaged and kept.
	unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error)
	// discard removes a file of a put that failed, and returns the bytes of it that are left and booked.
	discard(name string, most int64) (left int64)
}

// rootCustody is the part in a root's life.
type rootCustody interface {
	// lockOut keeps hosts away that would use the root in another way. The root's own lock file is held.
	lockOut(ctx context.Context) error
	// identify says whether the directory is one to continue with, and whether it is empty.
	identify() (empty bool, err error)
	// recover finds what is there, or begins a scan.
	recover(ctx context.Context) error
	// scan looks at every file, once.
	scan(ctx context.Context) error
	// judge judges what a scan meets.
	judge() recovery.Judge
	// grants says whether lookups may grant entries. The root's lock is held.
	grants() bool
	// start begins the root's own work, which ends with the store.
	start()
	// save keeps what the next start can use, at the end.
	save()
	// leave ends the host's part. Nothing else uses the root any more.
	leave()
	// step is for tests: see [Scheduler].
	step(ctx context.Context)
	stats() *SharedStats
}
