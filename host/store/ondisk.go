package store

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
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
	PoliciesDir    = policiesDir // place policies that named files, and their modules; see [JudgeKeptPolicy]
	WrittenFile    = writtenFile
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

// JudgeCheckpoint compares a checkpoint with its checksums.
func JudgeCheckpoint(f io.ReaderAt, size int64) error { return pieceformat.CheckCheckpoint(f, size) }

// JudgeState compares what an evict policy kept of itself with its checksum.
func JudgeState(f io.ReaderAt, size int64) error {
	head := make([]byte, stateHead)
	if n, err := f.ReadAt(head, 0); n < stateHead || string(head[:len(stateMagic)]) != stateMagic {
		if err != nil && err != io.EOF {
			return err
		}
		return fmt.Errorf("%w: not a policy's state", ErrDamaged)
	}
	le := binary.LittleEndian
	if format, data := uint64(le.Uint32(head[20:])), le.Uint64(head[24:]); format > maxState || data > maxState || uint64(size) != stateHead+format+data {
		return fmt.Errorf("%w: a policy's state of %d and %d bytes in a file of %d", ErrDamaged, format, data, size)
	}
	return judgeRest(f, stateHead, size, le.Uint64(head[stateHead-8:]))
}

func judgeRest(f io.ReaderAt, from, size int64, want uint64) error {
	sum := xxh3.New()
	if _, err := io.Copy(sum, io.NewSectionReader(f, from, size-from)); err != nil {
		return err
	}
	if got := sum.Sum64(); got != want {
		return fmt.Errorf("%w: checksum %016x, it says %016x", ErrDamaged, got, want)
	}
	return nil
}

// JudgeWritten says whether the count of bytes written today can be read.
func JudgeWritten(text []byte) error {
	var day, spent int64
	if _, err := fmt.Sscanf(string(text), "%d %d\n", &day, &spent); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// JudgeKeptPolicy judges a file of [PoliciesDir] by its name and content. Of a place policy that named files it gives the
// name of the module's file, which must stand beside it.
func JudgeKeptPolicy(base string, b []byte) (module string, err error) {
	if digest, ok := strings.CutSuffix(base, moduleSuffix); ok {
		if got := fmt.Sprintf("%x", sha256.Sum256(b)); got != digest {
			return "", fmt.Errorf("%w: the module's digest is %s", ErrDamaged, got)
		}
		return "", nil
	}
	if !strings.HasSuffix(base, namingSuffix) {
		return "", ErrNotPiece
	}
	var k keptNaming
	if err := json.Unmarshal(b, &k); err != nil {
		return "", fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if k.Module.SHA256 == "" || filepath.Base(k.Module.SHA256) != k.Module.SHA256 {
		return "", fmt.Errorf("%w: it names no module", ErrDamaged)
	}
	return k.Module.SHA256 + moduleSuffix, nil
}

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
