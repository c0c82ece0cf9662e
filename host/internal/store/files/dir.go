package files

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

type Config struct {
	Path            string // absolute
	Log             *slog.Logger
	Health          *health.Monitor
	Account         *capacity.Account
	Sequence        *Sequence
	Strict          bool  // names are made durable
	Readers         bool  // other programs read files and lock them
	QuarantineFiles int   // most files in quarantine
	QuarantineBytes int64 // most bytes in quarantine
}

// Dir is the directory of one root. It is safe for concurrent use.
type Dir struct {
	Reader
	Log        *slog.Logger
	Health     *health.Monitor
	Orphans    Orphans
	Quarantine Quarantine
	SyncFails  atomic.Uint64

	account  *capacity.Account
	strict   bool
	readers  bool
	owned    bool         // set by OwnDirs
	settling sync.RWMutex // held for writing while a directory is created or removed, for reading while names are made durable
	lasting  sync.Map     // directories with durable names
	lastingN atomic.Int64
	counting counting
}

// New returns a Dir. It does not access the disk.
func New(cfg Config) *Dir {
	d := &Dir{
		Reader: NewReader(cfg.Health.FS(), cfg.Path), Log: cfg.Log, Health: cfg.Health, account: cfg.Account, strict: cfg.Strict,
		readers: cfg.Readers,
	}
	d.Orphans.init(d)
	d.Quarantine.init(d, cfg)
	return d
}

// Unlink removes a file. The error is [fs.ErrNotExist] if there is none. An unlink can report an error although it succeeded,
// so Unlink then looks the name up. After any other error the file may still exist.
func (d *Dir) Unlink(name string) error {
	err := d.remove(name)
	if err == nil {
		d.Leave(name)
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		d.Quarantine.Recount()
		return err
	}
	switch info, serr := d.FS.Stat(name); {
	case errors.Is(serr, fs.ErrNotExist):
		return nil
	case Misled(serr), serr == nil && info.IsDir():
		return fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	return err
}

// remove unlinks a file, unless another program has locked it for reading, as a check of the root does. Unlinking would leave
// the file's bytes in use without a name.
func (d *Dir) remove(name string) error {
	if d.readers {
		if f, err := d.FS.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err == nil { // if it cannot be opened, a lock cannot be detected
			err = staging.LockFile(f, unix.LOCK_EX)
			_ = f.Close() // closed before the unlink, since NFS renames open files instead of removing them
			if errors.Is(err, staging.ErrLocked) {
				return fmt.Errorf("%w: %s", ErrRead, name)
			}
		}
	}
	return d.FS.Remove(name)
}

// Remove is like Unlink, but a file that cannot be removed becomes an orphan. left is the part of its size that the account did
// not already include from an earlier attempt. most is the size to assume if the size is unknown.
func (d *Dir) Remove(name string, most int64) (left int64, err error) {
	if err = d.Unlink(name); err == nil || errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	if info, serr := d.FS.Stat(name); serr == nil && (d.readers || most == 0) { // otherwise most stands: the allocated size may be one that a server reports
		most = pieceformat.Padded(info.Allocated)
	}
	if !errors.Is(err, ErrRead) { // a reader ends by itself
		d.Log.Error("file not unlinked; will retry, its bytes stay in the account", "file", name, "error", err)
	}
	return d.Orphans.again(name, most), err
}

// Misled reports whether an error means that no file can have the name, because a directory has the name or an element of its
// path is no directory.
func Misled(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EISDIR) }

// Unblock removes an obstacle to a name: a link, pipe, socket or device in the place of a directory is removed. With force, any
// other obstacle on the path or at the name itself is removed as well: a file is moved to quarantine and a directory is
// renamed. Unblock reports whether it removed anything.
func (d *Dir) Unblock(name string, force bool, cause error) (done bool) {
	for end := len(d.Slash); end < len(name); end++ {
		if name[end] != '/' {
			continue
		}
		info, err := d.FS.Stat(name[:end])
		switch {
		case err != nil:
			return false
		case info.IsDir():
		case force || !info.Mode.IsRegular():
			d.Quarantine.Isolate(name[:end], cause)
			return true
		default:
			return false
		}
	}
	if !force {
		return false
	}
	if info, err := d.FS.Stat(name); err == nil && info.IsDir() {
		return health.Clear(d.FS, name, false, d.Log) == nil
	}
	d.Quarantine.Isolate(name, cause)
	return true
}

// Discard is like Remove for callers that do not need the error.
func (d *Dir) Discard(name string, most int64) (left int64) {
	left, _ = d.Remove(name, most)
	return left
}

// ErrSync means that something could not be made durable.
var ErrSync = errors.New("store: sync failed")

// ErrRead means that another program is reading a file that is to be unlinked.
var ErrRead = errors.New("store: the file is being read")

// ErrBusy means that another host has locked the root.
var ErrBusy = errors.New("store: root is in use")
