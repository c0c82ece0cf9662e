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
	Readers         bool  // other programs read files, with locks
	QuarantineFiles int   // most that the quarantine keeps
	QuarantineBytes int64 // likewise
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
	owned    bool         // see OwnDirs
	settling sync.RWMutex // for writing: a directory is made or goes; for reading: names are made durable
	lasting  sync.Map     // directories with durable names
	lastingN atomic.Int64
	counting counting
}

// New makes a Dir. Nothing is looked at yet.
func New(cfg Config) *Dir {
	d := &Dir{
		Reader: NewReader(cfg.Health.FS(), cfg.Path), Log: cfg.Log, Health: cfg.Health, account: cfg.Account, strict: cfg.Strict,
		readers: cfg.Readers,
	}
	d.Orphans.init(d)
	d.Quarantine.init(d, cfg)
	return d
}

// Unlink removes a file. The error is [fs.ErrNotExist] when there was none. An unlink can report an error although it
// happened, so the name is looked up again: with any other error the file is there, or may be.
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

// remove unlinks a file that no other program reads with a lock, as a check of the root does: it would take its bytes without a name.
func (d *Dir) remove(name string) error {
	if d.readers {
		if f, err := d.FS.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err == nil { // else it cannot be told
			err = staging.LockFile(f, unix.LOCK_EX)
			_ = f.Close() // it was only opened; what is open when it is unlinked gets another name on NFS
			if errors.Is(err, staging.ErrLocked) {
				return fmt.Errorf("%w: %s", ErrRead, name)
			}
		}
	}
	return d.FS.Remove(name)
}

// Remove is Unlink, but a file that stays becomes an orphan. left is what it takes (most, if that is unknown) and the account
// had not yet from an earlier try.
func (d *Dir) Remove(name string, most int64) (left int64, err error) {
	if err = d.Unlink(name); err == nil || errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	if info, serr := d.FS.Stat(name); serr == nil && (d.readers || most == 0) { // else a server says it
		most = pieceformat.Padded(info.Allocated)
	}
	if !errors.Is(err, ErrRead) { // that ends by itself
		d.Log.Error("file not unlinked; will retry, its bytes stay in the account", "file", name, "error", err)
	}
	return d.Orphans.again(name, most), err
}

// Misled says of an error that no file can have the name: something that is no directory stands on the way to it, or a
// directory has it.
func Misled(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EISDIR) }

// Unblock frees the way to a name: a link, pipe, socket or device that stands where a directory should be is removed. With
// force, all else that stands there, or under the name itself, goes too: a file into quarantine, a directory to another
// name. It says whether it has done something.
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

// Discard is Remove where it does not matter why.
func (d *Dir) Discard(name string, most int64) (left int64) {
	left, _ = d.Remove(name, most)
	return left
}

// ErrSync says that something could not be made durable.
var ErrSync = errors.New("store: sync failed")

// ErrRead says that another program reads a file that is to be unlinked.
var ErrRead = errors.New("store: the file is being read")

// ErrBusy says that another host has the root.
var ErrBusy = errors.New("store: root is in use")
