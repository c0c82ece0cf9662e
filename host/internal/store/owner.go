package store

import (
	"context"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// owner is one of the two axes of a root: the hosts that write to it. A [sole] owner is this host alone. A [joint] owner is
// this host as one of several. The other axis is the [Medium], the place of the bytes. A root is plain code between the two. It
// asks the medium for its traits and the configuration whether the root is shared. TestPairs checks the following rules for
// every pair that exists.
//
// Room. The bytes of a reserved put are in the root's account. The account stays within the root's limit by evictions of this
// host, or of the one host that evicts for all. A put reserves while it has the root's turn. If reserve fails, nothing is
// booked and the put has no file.
//
// Names. A name belongs to one piece. publish gives the name or fails, and replaces no file. nameTaken judges a file that has
// the name already, and removes it only if it is this host's to remove. Under its name, a piece is complete or absent.
//
// Other hosts. Lookups grant entries only while grants reports that this host learns in time of removals by others. The files
// of an entry that has left the index are removed once, by unlink, regardless of which host removes them. Bytes that are left
// on the disk stay in the account.
//
// The root's lock is not held during a call unless the method's comment says so.
type owner interface {
	// lock excludes hosts that would use the root in another way. The root's own lock file is held.
	lock(ctx context.Context) error
	// recover finds the existing entries, or begins a scan.
	recover(ctx context.Context) error
	// scan scans every file once.
	scan(ctx context.Context) error
	// leave ends this host's use of the root. Nothing else may use the root any more.
	leave()

	// reserve books the bytes of a put.
	reserve(ctx context.Context, w reservation) error
	// mayEnter returns an error if a put can neither create an entry of a key now nor wait for the key's removal. The root's
	// lock is held.
	mayEnter(cl *catalog.Class, key *kv.Key, fp uint64) error
	// grants reports whether lookups may grant entries. The root's lock is held.
	grants() bool

	// createTemp creates the temporary of a put and sets its name in the put.
	createTemp(p *Put) (staging.File, error)
	// publish renames the temporary to its name, which becomes its only name. It returns no error if the rename has taken
	// effect in spite of one.
	publish(p *Put, info staging.Info) error
	// nameTaken frees the name of a put, or switches to another name. The file with the name is damaged or belongs to another
	// key.
	nameTaken(p *Put, h *pieceformat.Header, damage error) error
	// settle ends the claims of a put on room other than its entry's. temp is the name that its temporary had, or empty, and
	// left is the number of bytes that could not be removed.
	settle(p *Put, temp string, left int64)
	// withdraw removes the published file of a put that came second or could not be made durable.
	withdraw(p *Put)
	// unlink removes files of an evicted entry. It returns the bytes that are left and the reason.
	unlink(v *entries.Eviction, pieces uint64) (left int64, failed error)
}

// newTemp is the flags for the creation of a temporary.
const newTemp = os.O_RDWR | os.O_CREATE | os.O_EXCL

// reservation is the request of a put for room in a root.
type reservation struct {
	capacity.Want
	slot     bool         // a slot is needed as well
	spares   uint32       // least number of hits at which an entry without a copy in the next level is spared; 0 spares none
	reuseFor *Put         // put that may reuse the file of a victim; may be nil
	enter    func() error // called with the lock held once everything is reserved; if it fails, nothing stays reserved
}
