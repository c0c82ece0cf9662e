package store

import (
	"context"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// kind is a kind of root: a directory that one host has for itself ([ownRoot]), one that several hosts share
// ([sharedRoot]), memory ([memoryRoot]), a part of a bucket ([objectRoot], [sharedObjectRoot]), or what other hosts lend ([peerRoot]). The
// store calls its methods and never asks which one it is, so another kind is one more implementation and one more case of [newKind]. Every kind promises:
//
// Room. A put that is reserved has its bytes in the root's account, which stays within the root's limit by evictions of
// this host, or of the one host that evicts for all. A put reserves while it has the root's turn. Where reserve fails,
// nothing is booked, and the put has no file.
//
// Names. A name belongs to one piece: publish gives it or fails, and replaces no file. A file that has the name already is
// judged by nameTaken, which removes it only if it is this host's to remove. A piece is whole under its name, or is not
// there. A put's temporary is touched by createTemp, openTemp, publish and removeTemp alone.
//
// Other hosts. Lookups grant entries only while grants says that this host learns in time of removals by others. Files of an
// entry that has left the index go once, by unlink or unlinkDamaged, whichever host removes them, and the bytes that are
// left on the disk stay in the account.
//
// Entries. An entry has bytes for the ranks of entryRanks: for all of them where one host writes them, and for one where
// other hosts may write the rest.
//
// The root's lock is not held during a call, unless the method's comment says so.
type kind interface {
	// The root's life.

	// file is the name of one of the store's own files in the root; where hosts share it each has its own.
	file(base string) string
	// lockOut keeps hosts away that would use the root in another way. The root's own lock file is held.
	lockOut(ctx context.Context) error
	// identify says whether the directory is one to continue with, and whether it is empty.
	identify() (empty bool, err error)
	// recover finds the entries that are there, or begins a scan.
	recover(ctx context.Context) error
	// scan looks at every file, once.
	scan(ctx context.Context) error
	// judge judges what a scan meets.
	judge() scanJudge
	// ownsTemp says whether a temporary of an earlier run of a host is this host's to remove.
	ownsTemp(host string) bool
	// forget removes a file of the catalog that this host has no use for.
	forget(dir, base string)
	// start begins the root's own work, which ends with the store.
	start()
	// drain copies entries that would be lost at the end to the next level.
	drain(ctx context.Context)
	// save writes the root's state at the end, for the next start.
	save()
	// leave ends the host's part. Nothing else uses the root any more.
	leave()
	// step is for tests: see [Scheduler].
	step(ctx context.Context)
	// stats are those of a host among others, or nil.
	stats() *SharedStats

	// Room.

	// turn takes the turn to reserve and evict. endTurn gives it back.
	turn(ctx context.Context, tenant uint32) error
	endTurn()
	// reserve books what a put needs.
	reserve(ctx context.Context, w reservation) error
	// grew follows a reservation: entries leave for the next level if that is due. The root's lock is held.
	grew()
	// shrink brings the root within its limit as far as this host keeps it, and says whether it is.
	shrink(ctx context.Context) bool
	// published follows the publication of a piece of an entry.
	published(m entries.Mark)
	// loaded follows a load of an entry that was found here.
	loaded(m entries.Mark)
	// offer offers entries that are to leave to the next level.
	offer()

	// Entries, and other hosts.

	// grants says whether lookups may grant entries. The root's lock is held.
	grants() bool
	// mayInsert says why a put cannot make its entry now, if so. The root's lock is held.
	mayInsert(p *Put) error
	// mayAwait says why a put of a key cannot wait for the removal of the key's entry, if so. The root's lock is held.
	mayAwait(key kv.Key) error
	// entryRanks are the ranks that an entry gets bytes for when the put of one of its ranks makes it.
	entryRanks(rank uint32, ranks uint64) uint64
	// aborted follows a put that failed. The root's lock is held.
	aborted(p *Put)

	// Files, and their names.

	// createTemp makes a put's temporary.
	createTemp(p *Put) (staging.File, error)
	// openTemp opens it again.
	openTemp(p *Put) (staging.File, error)
	// publish gives the temporary its name, which it then has alone. It is no error where it has it all the same.
	publish(p *Put, info staging.Info) error
	// nameTaken frees a put's name or finds another one: the file that has the name is damaged, or of another key.
	nameTaken(p *Put, h *pieceformat.Header, damage error) error
	// removeTemp unlinks a put's temporary, which is there.
	removeTemp(p *Put)
	// giveBack ends a put's claims on the root besides its entry. Its temporary has its name, or has gone.
	giveBack(p *Put)
	// unlink removes files of an evicted entry and returns the bytes of those that are left, and why.
	unlink(v *entries.Eviction, pieces uint64) (left int64, failed error)
	// unlinkDamaged removes an evicted entry's files, one of which is damaged and kept.
	unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error)
	// dropped removes the published file of a put after its entry went.
	dropped(p *Put)
	// discard removes a file of a put that failed, and returns the bytes of it that are left and booked.
	discard(name string, most int64) (left int64)
}

// newKind is the kind that a root's configuration names.
func newKind(r *root) kind {
	switch {
	case r.cfg.Lender != nil:
		return newPeerRoot(r)
	case r.cfg.Shared && r.cfg.NoDirectory:
		return newSharedObjectRoot(r)
	case r.cfg.Shared:
		return newSharedRoot(r)
	case r.cfg.Volatile:
		return memoryRoot{newOwnRoot(r)}
	case r.cfg.NoDirectory:
		return newObjectRoot(r)
	}
	return newOwnRoot(r)
}

// newTemp is the flags that a temporary is made with.
const newTemp = os.O_RDWR | os.O_CREATE | os.O_EXCL

// guardDirectory is the root's directory under its lock file; alone says that no other host uses it.
func (r *root) guardDirectory(k kind, alone bool) {
	r.directory = health.NewDirectory(r.Health, r.Path, r.Slash+k.file(pieceformat.LockFile), pieceformat.RootDirs[:], alone)
}
