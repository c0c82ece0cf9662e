package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/staging"
)

// What a tool that works on a root beside a host, or without one, has to know of it.

// Directories and files that the store keeps for itself, below a root.
const (
	MetaDir       = metaDir
	NamespacesDir = namespacesDir // texts, each named by its digest
	PlansDir      = plansDir      // encoded plans, each named by its digest
	QuarantineDir = quarantineDir
	LockFile      = lockFile // of a root that one host has; a host of a shared root locks LockFile.<host id>
	TouchesFile   = touchesFile
	// CheckpointFile lets the next start do without a scan: who changes a root while no host has it removes it first.
	CheckpointFile = checkpointFile
	StateFile      = stateFile
)

// Walk calls visit for every file below dir, on several goroutines, and returns when all are done. Hidden directories,
// the store's own among them, are left out; links are not followed. skipped hears of directories below dir that cannot
// be read.
func Walk(ctx context.Context, fsys staging.FS, dir string, workers int, visit func(rel string, e fs.DirEntry), skipped func(rel string, err error)) error {
	return scan(ctx, fsys, dir, workers, visit, skipped)
}

// TempOwner reads the id of the host that writes, or wrote, a temporary out of its base name.
func TempOwner(base string) (host string, ok bool) { return tempOwner(base) }

// TextDigest is the name of a namespace whose text is known and nothing else.
func TextDigest(text []byte) chunk.Digest { return textDigest(text) }

// ReadTable appends the checksums of the header's extents to dst[:0]. b starts at the table.
func (h *Header) ReadTable(b []byte, dst []uint64) ([]uint64, error) {
	if int64(len(b)) < h.DataOffset-Page {
		return nil, errors.Join(ErrDamaged, errors.New("the table is cut off"))
	}
	return h.readTable(b, dst)
}

// repairMark is in the names of files that a repair moved into quarantine, and in no other.
const repairMark = "-repair-"

// RepairName is the name, below a root, that a repair gives a file that it moves into quarantine. Names sort by time.
func RepairName(when time.Time, base string) string {
	head := fmt.Sprintf("%016x%s", when.UnixNano(), repairMark)
	return quarantineDir + "/" + head + base[:min(len(base), maxName-len(head))]
}

// IsDamage says that an error is about a file's content and not about reading it.
func IsDamage(err error) bool {
	return isDamage(err) || errors.Is(err, ErrWrongPiece) || errors.Is(err, chunk.ErrChecksum)
}
