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

// Scheme is the prefix of the path of a root in a bucket.
const Scheme = "s3://"

// metaDir is the prefix of the names of the store's own files.
const metaDir = ".kvhost"

// Split splits the path of a root, s3://bucket/prefix. The prefix has no slash at either end.
func Split(root string) (bucket, prefix string) {
	bucket, prefix, _ = strings.Cut(strings.TrimPrefix(root, Scheme), "/")
	return bucket, strings.Trim(prefix, "/")
}

type Config struct {
	Path      string // common prefix of all names: s3://bucket/prefix
	Endpoint  string // https://host; empty means AWS
	Region    string // empty means the region in the environment
	PathStyle bool   // the bucket is in the path of requests and not in the name of the host
	CAFile    string // certificates of the authorities that may sign the server's certificate; empty means the system's
	// Target returns the future name of a temporary. It returns false for other files, and for temporaries without a known
	// future name.
	Target func(temp string) (target string, is bool)
	Holder string        // name of the lock's holder, for other hosts to read
	Term   time.Duration // time for which a lock is valid without being renewed; 0 means 20 s
	// Shared means that other hosts also write below the prefix. A server without conditional writes is then refused, and [FS.WriteWhile]
	// determines when this host may write.
	Shared bool
	Part   int // bytes of a part of a written file, which has two of them in memory and at most 10,000; 0 means 8 MiB
	// Budget is the time limit of a request with all its attempts; 0 means 12 s. It should be less than the limit for file operations, so
	// that a slow server is not mistaken for one that hangs.
	Budget time.Duration
	Log    *slog.Logger
}

// devices numbers the file systems of this process.
var devices atomic.Uint64

// FS is a [staging.FS] of the objects below a prefix. It is safe for concurrent use.
type FS struct {
	*client
	free   *client // client for locks, which may write at any time
	cfg    Config
	prefix string // prefix of keys: empty, or with a slash at its end
	memory buffers
	first  atomic.Int64 // end of the last first read of an object
	top    string       // Config.Path, cleaned
	dev    uint64
	proc   string // /proc, or its replacement in a test

	mu      sync.Mutex
	pending map[string]*upload // files without an object, by name
	own     map[string]bool    // locks of directories, which exclude other users in this process
	leases  map[string]*lease  // present and former locks
	number  uint64             // number of the latest file

	allowed       atomic.Pointer[func() bool] // see WriteWhile
	unconditional atomic.Bool                 // the server is known to have no conditional writes
}

// Open returns the file system of a bucket's prefix. It sends no request.
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

// misread returns a part of a prefix that a server would change in a key, or that a list cannot contain.
func misread(prefix string) (part string, bad bool) {
	for part := range strings.SplitSeq(prefix, "/") {
		if part == "." || part == ".." || part == "" && prefix != "" || strings.ContainsFunc(part, unicode.IsControl) {
			return part, true
		}
	}
	return "", false
}

// Close releases held locks and closes connections.
func (f *FS) Close() error {
	var errs []error
	for _, held := range f.held() {
		errs = append(errs, held.Close())
	}
	f.transport.CloseIdleConnections()
	return errors.Join(errs...)
}

// key returns the key of a name. The name may have been cleaned, so that "//" of the scheme has become "/".
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

// Device returns the same device number for all names. Without this method, [staging.OpenDirect] would look for the device of a
// real directory.
func (f *FS) Device(string) (uint64, error) { return f.dev, nil }

// newNumber returns a number that no other file of this bucket has.
func (f *FS) newNumber() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.number++
	return f.number
}

// held returns the locks that were taken.
func (f *FS) held() []*lease {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.leases))
}

// lock returns the latest lock of a name, or nil.
func (f *FS) lock(name string) *lease {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.leases[name]
}

// WriteWhile restricts writes in a shared bucket: pieces are published and removed only while may returns true. It is called before each
// attempt. Files below .kvhost are not affected, because each belongs to one host or is written by all hosts with the same content.
func (f *FS) WriteWhile(may func() bool) { f.allowed.Store(&may) }

// mayWrite returns an error if the lock has lapsed, because another host may have taken it.
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

// conditional reports whether the server is assumed to have conditional writes.
func (f *FS) conditional() bool { return !f.unconditional.Load() }

// unpublished returns a file without an object, or nil.
func (f *FS) unpublished(name string) *upload {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pending[name]
}

// OpenFile implements [staging.FS]. A created file does not occupy its name: an object may have the same one.
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

// target returns the future name of a created file.
func (f *FS) target(name string) string {
	if f.cfg.Target != nil {
		if target, is := f.cfg.Target(name); is {
			return target
		}
	}
	return name
}

func (f *FS) Rename(oldname, newname string) error { return f.rename(oldname, newname, true) }

// RenameNoReplace implements [staging.FS]. Without conditional writes, it looks for an object before it writes, so it can race
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

// Link implements [staging.FS]. It fails, because objects have no links.
func (f *FS) Link(_, newname string) error { return pathError("link", newname, unix.EOPNOTSUPP) }

// Remove implements [staging.FS]. It does not report a missing object.
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
	if f.target(name) != name { // temporaries are not objects
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

// below returns the prefix of the keys of files in a directory.
func (f *FS) below(name string) string {
	if f.isTop(name) {
		return f.prefix
	}
	return f.key(name) + "/"
}

// List calls found for the files below a directory, in the order of their keys. It takes one request for 1,000 files.
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
		if o.Key == prefix { // a marker that some tools create for a directory
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

// SyncDir implements [staging.FS]. It does nothing, because acknowledged writes are durable.
func (f *FS) SyncDir(string) error { return nil }

func (f *FS) SyncFS(string) error { return nil }

// Statfs implements [staging.FS]. A bucket reports neither its size nor its free space.
func (f *FS) Statfs(name string) (staging.Space, error) {
	return staging.Space{}, pathError("statfs", name, unix.EOPNOTSUPP)
}
