package s3fs

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/s3utils"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// Scheme begins the path of a root in a bucket.
const Scheme = "s3://"

// metaDir begins the names of the files that a store keeps for itself.
const metaDir = ".kvhost"

// Split takes the path of a root apart: s3://bucket/prefix, the prefix without a slash at either end.
func Split(root string) (bucket, prefix string) {
	bucket, prefix, _ = strings.Cut(strings.TrimPrefix(root, Scheme), "/")
	return bucket, strings.Trim(prefix, "/")
}

type Config struct {
	Path      string // that names begin with: s3://bucket/prefix
	Endpoint  string // https://host; empty: of AWS
	Region    string // empty: as the environment says
	PathStyle bool   // the bucket is in the path of requests, and not in the name of the host
	CAFile    string // certificates of who may sign the server's; empty: the system's
	// Target is the name that a temporary is to get. It is false for what is none, and for one that does not tell.
	Target func(temp string) (target string, is bool)
	Holder string        // who a lock is held by, for others to read
	Term   time.Duration // that a lock is held without being renewed: 20 s
	// Shared says that other hosts write below the prefix too: a server without conditional writes is refused then, and [FS.WriteWhile]
	// says when this one may.
	Shared bool
	Part   int // bytes of a part of a file that is written, which has two of them in memory: 8 MiB. It can have 10,000
	// Budget is what a request may take with all its attempts: 12 s. It is to be less than the limit of an operation on files, so
	// that a slow server is not taken for one that hangs.
	Budget time.Duration
	Log    *slog.Logger
}

// devices numbers the file systems of this process.
var devices atomic.Uint64

// FS is the objects below a prefix, as a [staging.FS]. It is safe for concurrent use.
type FS struct {
	*client
	free   *client // writes at any time: locks
	cfg    Config
	prefix string // of keys: empty, or with a slash at its end
	memory buffers
	first  atomic.Int64 // bytes of the last read that was an object's first
	top    string       // Config.Path, cleaned
	dev    uint64
	proc   string // /proc, or what a test has in its place

	mu      sync.Mutex
	pending map[string]*upload // files that have no object yet, by name
	own     map[string]bool    // locks of directories, which keep others of this process out
	leases  map[string]*lease  // locks that are held, or were
	number  uint64             // of the file made last

	allowed       atomic.Pointer[func() bool] // see WriteWhile
	unconditional atomic.Bool                 // the server is known to have no conditional writes
}

// Open makes the file system of a bucket's prefix. It asks the server nothing.
func Open(cfg Config) (*FS, error) {
	bucket, prefix := Split(cfg.Path)
	if bucket == "" || !strings.HasPrefix(cfg.Path, Scheme) {
		return nil, refuse("path", "%q, want s3://bucket/prefix", cfg.Path)
	}
	if err := s3utils.CheckValidBucketName(bucket); err != nil {
		return nil, refuse("path", "%q: no bucket has that name: %v", cfg.Path, err)
	}
	if part, bad := misread(prefix); bad {
		return nil, refuse("path", "%q: servers join keys with %q in them, or end them, so that what was stored is not listed; want a prefix like a/b",
			cfg.Path, part)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Budget = cmp.Or(cfg.Budget, 12*time.Second)
	cfg.Term, cfg.Part = cmp.Or(cfg.Term, 20*time.Second), cmp.Or(cfg.Part, 8<<20)
	c, err := newClient(&cfg, bucket)
	if err != nil {
		return nil, err
	}
	f := &FS{client: c, cfg: cfg, proc: "/proc", top: path.Clean(cfg.Path), dev: 1<<62 | devices.Add(1),
		pending: map[string]*upload{}, own: map[string]bool{}, leases: map[string]*lease{}, number: uint64(time.Now().UnixNano())}
	f.may, f.free = f.mayWrite, c.apart(c.budget, c.answer)
	if prefix != "" {
		f.prefix = prefix + "/"
	}
	return f, nil
}

// misread is a part of a prefix that a key does not keep, or that no list can name.
func misread(prefix string) (part string, bad bool) {
	for part := range strings.SplitSeq(prefix, "/") {
		if part == "." || part == ".." || part == "" && prefix != "" || strings.ContainsFunc(part, unicode.IsControl) {
			return part, true
		}
	}
	return "", false
}

// Close ends the renewal of a lock that is held, and closes connections.
func (f *FS) Close() error {
	var errs []error
	for _, held := range f.held() {
		errs = append(errs, held.Close())
	}
	f.transport.CloseIdleConnections()
	return errors.Join(errs...)
}

// key is the key of a name, which is cleaned: "//" of the scheme may have become "/".
func (f *FS) key(name string) string {
	return f.prefix + strings.TrimPrefix(strings.TrimPrefix(path.Clean(name), f.top), "/")
}

func (f *FS) isTop(name string) bool { return len(path.Clean(name)) <= len(f.top) }

func (f *FS) info(v version) staging.Info {
	return staging.Info{Size: v.size, Allocated: v.size, ModTime: v.modified, Dev: f.dev, Ino: v.id, Links: 1,
		Owner: uint32(os.Geteuid()), Mode: 0o600}
}

func (f *FS) directory() staging.Info {
	return staging.Info{Dev: f.dev, Ino: 1, Links: 2, Owner: uint32(os.Geteuid()), Mode: fs.ModeDir | 0o700}
}

// Device is that of all names: see [staging.OpenDirect], which would ask for it otherwise.
func (f *FS) Device(string) (uint64, error) { return f.dev, nil }

// newNumber numbers a file, as no other of this bucket is.
func (f *FS) newNumber() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.number++
	return f.number
}

// held are the locks that were taken.
func (f *FS) held() []*lease {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.leases))
}

// lock is the lock of a name that was taken last, or nil.
func (f *FS) lock(name string) *lease {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.leases[name]
}

// WriteWhile has pieces published and removed only while may says so, of a file system that is shared. It is asked before each attempt.
// What is below .kvhost is each host's own, or the same whoever writes it.
func (f *FS) WriteWhile(may func() bool) { f.allowed.Store(&may) }

// mayWrite fails once the lock that was taken has lapsed: another host may have it.
func (f *FS) mayWrite(key string) error {
	if f.cfg.Shared {
		if may := f.allowed.Load(); may != nil && !strings.HasPrefix(key, f.prefix+metaDir) && !(*may)() {
			return ErrNotNow
		}
		return nil
	}
	for _, held := range f.held() {
		if !held.stands() {
			return ErrLapsed
		}
	}
	return nil
}

// conditional says whether the server is taken to have conditional writes.
func (f *FS) conditional() bool { return !f.unconditional.Load() }

// unpublished finds a file that has no object yet.
func (f *FS) unpublished(name string) *upload {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pending[name]
}

// OpenFile implements [staging.FS]. A file that is made takes no name: an object may have it.
func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	const writes = os.O_WRONLY | os.O_RDWR
	if flag&unix.O_DIRECT != 0 {
		return nil, pathError("open", name, unix.EINVAL)
	}
	if f.isTop(name) {
		return nil, pathError("open", name, unix.EISDIR)
	}
	u := f.unpublished(name)
	switch {
	case u != nil && flag&os.O_EXCL != 0:
		return nil, pathError("open", name, unix.EEXIST)
	case u != nil:
		if flag&os.O_TRUNC != 0 {
			if err := u.giveUp(); err != nil {
				return nil, failed("open", name, err, true)
			}
		}
		return &file{content: u, name: name, writes: flag&writes != 0}, nil
	case flag&os.O_CREATE == 0:
		return f.openObject(name)
	}
	u = &upload{fs: f, name: name, id: f.newNumber(), key: f.key(f.target(name)), modified: time.Now()}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending[name] = u
	return &file{content: u, name: name, writes: true}, nil
}

// target is the name that a file that is made is to get.
func (f *FS) target(name string) string {
	if f.cfg.Target != nil {
		if target, is := f.cfg.Target(name); is {
			return target
		}
	}
	return name
}

func (f *FS) Rename(oldname, newname string) error { return f.rename(oldname, newname, true) }

// RenameNoReplace implements [staging.FS]. Where the server has no conditional writes it looks before it writes, which can race
// with another writer.
func (f *FS) RenameNoReplace(oldname, newname string) error { return f.rename(oldname, newname, false) }

func (f *FS) rename(oldname, newname string, replace bool) error {
	err := f.mayWrite(f.key(newname))
	u := f.unpublished(oldname)
	if err == nil && !replace && (u == nil || !f.conditional()) {
		switch _, look := f.head(f.key(newname)); {
		case look == nil:
			return pathError("rename", newname, unix.EEXIST)
		case !isCode(look, http.StatusNotFound):
			err = look
		}
	}
	switch {
	case err != nil:
	case u != nil:
		if err = u.publish(f.key(newname), !replace); err == nil {
			f.mu.Lock()
			delete(f.pending, oldname)
			delete(f.pending, newname)
			f.mu.Unlock()
		}
	default:
		var v version
		if v, err = f.head(f.key(oldname)); err == nil {
			if err = f.copy(f.key(oldname), v.etag, f.key(newname)); err == nil {
				err = f.remove(f.key(oldname))
			}
		}
	}
	return failed("rename", newname, err, true)
}

// Link implements [staging.FS]. There are no links.
func (f *FS) Link(_, newname string) error { return pathError("link", newname, unix.EOPNOTSUPP) }

// Remove implements [staging.FS]. Whether there was an object is not asked.
func (f *FS) Remove(name string) error {
	if f.isTop(name) {
		return pathError("remove", name, unix.EBUSY)
	}
	if u := f.unpublished(name); u != nil {
		f.mu.Lock()
		delete(f.pending, name)
		f.mu.Unlock()
		return failed("remove", name, u.giveUp(), true)
	}
	if f.target(name) != name { // no temporary is an object
		return pathError("remove", name, unix.ENOENT)
	}
	err := f.mayWrite(f.key(name))
	if err == nil {
		err = f.remove(f.key(name))
	}
	return failed("remove", name, err, true)
}

func (f *FS) Mkdir(string, fs.FileMode) error { return nil }

func (f *FS) MkdirAll(string, fs.FileMode) error { return nil }

// below is what the keys of files in a directory begin with.
func (f *FS) below(name string) string {
	if f.isTop(name) {
		return f.prefix
	}
	return f.key(name) + "/"
}

// List calls found for the files below a directory, in order of their keys, which costs a request for 1,000 of them.
func (f *FS) List(ctx context.Context, name string, found func(rel string, size int64, modified time.Time)) error {
	prefix := f.below(name)
	return failed("list", name, f.list(ctx, prefix, "", func(o *minio.ObjectInfo, _ bool) {
		if rel := o.Key[len(prefix):]; rel != "" && !strings.HasSuffix(rel, "/") {
			found(rel, o.Size, o.LastModified)
		}
	}), false)
}

func (f *FS) ReadDir(name string) (list []fs.DirEntry, err error) {
	prefix := f.below(name)
	err = f.list(context.Background(), prefix, "/", func(o *minio.ObjectInfo, isPrefix bool) {
		if o.Key == prefix { // a mark that some tools leave for a directory
			return
		}
		info := f.info(versionOf(o))
		if isPrefix {
			info = f.directory()
		}
		list = append(list, info.Entry(path.Base(o.Key)))
	})
	if err != nil {
		return nil, failed("readdir", name, err, false)
	}
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, nil
}

func (f *FS) Stat(name string) (staging.Info, error) {
	if f.isTop(name) {
		return f.directory(), nil
	}
	f.mu.Lock()
	held, u := f.leases[name], f.pending[name]
	f.mu.Unlock()
	if u != nil {
		return u.stat(), nil
	}
	if held != nil {
		return held.stat()
	}
	v, err := f.head(f.key(name))
	if err != nil {
		return staging.Info{}, failed("stat", name, err, false)
	}
	return f.info(v), nil
}

// SyncDir implements [staging.FS]. What a server has acknowledged is durable.
func (f *FS) SyncDir(string) error { return nil }

func (f *FS) SyncFS(string) error { return nil }

// Statfs implements [staging.FS]. A bucket does not tell how much is in it, or will fit.
func (f *FS) Statfs(name string) (staging.Space, error) {
	return staging.Space{}, pathError("statfs", name, unix.EOPNOTSUPP)
}
