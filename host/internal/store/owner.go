package store

import (
	"context"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// owner is one of the two axes of a root: which hosts write there. A [sole] owner is this host alone; a [joint] owner is this host
// as one of several. The other axis is the [Medium], where the bytes lie. A root is plain code between the two, which asks the
// medium for its traits and the configuration whether the root is shared, and TestPairs holds every pair that exists to what
// follows.
//
// Room. A put that is reserved has its bytes in the root's account, which stays within the root's limit by evictions of
// this host, or of the one host that evicts for all. A put reserves while it has the root's turn. Where reserve fails,
// nothing is booked, and the put has no file.
//
// Names. A name belongs to one piece: publish gives it or fails, and replaces no file. A file that has the name already is
// judged by nameTaken, which removes it only if it is this host's to remove. A piece is whole under its name, or is not
// there.
//
// Other hosts. Lookups grant entries only while grants says that this host learns in time of removals by others. Files of an
// entry that has left the index go once, by unlink, whichever host removes them, and the bytes that are left on the disk stay in
// the account.
//
// The root's lock is not held during a call, unless the method's comment says so.
type owner interface {
	// lock keeps hosts away that would use the root in another way. The root's own lock file is held.
	lock(ctx context.Context) error
	// recover finds the entries that are there, or begins a scan.
	recover(ctx context.Context) error
	// scan looks at every file, once.
	scan(ctx context.Context) error
	// leave ends the host's part. Nothing else uses the root any more.
	leave()

	// reserve books the bytes of a put.
	reserve(ctx context.Context, w reservation) error
	// mayEnter says why no put can make an entry of a key now, or wait for the key's removal, if so. The root's lock is held.
	mayEnter(cl *catalog.Class, key *kv.Key, fp uint64) error
	// grants says whether lookups may grant entries. The root's lock is held.
	grants() bool

	// createTemp makes a put's temporary, and names it in the put.
	createTemp(p *Put) (staging.File, error)
	// publish gives the temporary its name, which it then has alone. It is no error where it has it all the same.
	publish(p *Put, info staging.Info) error
	// nameTaken frees a put's name or finds another one: the file that has the name is damaged, or of another key.
	nameTaken(p *Put, h *pieceformat.Header, damage error) error
	// settle ends a put's claims on room besides its entry's. Its temporary had a name, if any, and so many bytes are left of it.
	settle(p *Put, temp string, left int64)
	// withdraw removes the published file of a put that came second or could not be made durable.
	withdraw(p *Put)
	// unlink removes files of an evicted entry and returns the bytes of those that are left, and why.
	unlink(v *entries.Eviction, pieces uint64) (left int64, failed error)
}

// newTemp is the flags that a temporary is made with.
const newTemp = os.O_RDWR | os.O_CREATE | os.O_EXCL

// own gives the root its owner, and the judge of its scans.
func (r *root) own() {
	r.recovery = &recovery{root: r, kept: r.kept, set: &r.Set}
	if r.cfg.Shared {
		c := newJoint(r)
		r.owner, r.recovery.judge = c, judge{c}
	} else {
		r.owner, r.recovery.judge = newSole(r), soleJudge{}
	}
	r.directory = health.NewDirectory(r.Health, r.Path, r.Slash+r.file(pieceformat.LockFile), pieceformat.RootDirs[:], !r.cfg.Shared)
}
