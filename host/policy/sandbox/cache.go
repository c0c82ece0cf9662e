package sandbox

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	metering "github.com/kvhost/kvhost/host/policy/meter"
	"golang.org/x/sys/unix"
)

// Cache stores the results of loading a module: its metered form or the reason of its refusal, wazero's machine code,
// and the passed self-test. All processes that share the directory compile one module at a time.
type Cache struct {
	dir string // empty: nothing is stored
	mu  sync.Mutex
}

// CacheDir is the user's cache directory: $XDG_CACHE_HOME/kvhost, or .cache/kvhost at home. It is empty when neither is
// known.
func CacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "kvhost")
}

// OpenCache opens a cache in a directory, which it makes with mode 0700 if missing. With an empty dir it stores
// nothing. The directory's content is run as code, so it must belong to this user alone: anything else is an
// [ErrCache].
func OpenCache(dir string) (*Cache, error) {
	if dir == "" {
		return &Cache{}, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCache, err)
	}
	if err := private(dir); err != nil {
		return nil, err
	}
	prune(dir)
	return &Cache{dir: dir}, nil
}

func private(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCache, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: %s is not a directory", ErrCache, dir)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: %s belongs to another user, who could have this one run anything", ErrCache, dir)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%w: %s has mode %#o: others could have this user run anything; chmod 700 it", ErrCache, dir, mode)
	}
	return nil
}

// Close closes the cache. Modules opened with it must have been closed before.
func (c *Cache) Close(context.Context) error { return nil }

// lock waits until this process may compile.
func (c *Cache) lock(ctx context.Context) (unlock func(), err error) {
	c.mu.Lock()
	if c.dir == "" {
		return c.mu.Unlock, nil
	}
	f, err := os.OpenFile(filepath.Join(c.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		c.mu.Unlock()
		return nil, fmt.Errorf("%w: %w", ErrCache, err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close(); c.mu.Unlock() }, nil
		}
		if err == unix.EWOULDBLOCK || err == unix.EINTR {
			err = nil
		}
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
		if err != nil {
			f.Close()
			c.mu.Unlock()
			return nil, fmt.Errorf("%w: another process is compiling: %w", ErrCache, err)
		}
	}
}

// A verdict file is the magic, the SHA-256 of the rest, and then a module's metered form or, after a NUL, the reason of
// its refusal. Any other file is ignored.
const verdictMagic = "kvhost policy verdict 2\n"

// verdictKey is the file of a module's verdict, which depends on the module, the meter and the validator.
func (c *Cache) verdictKey(digest string, pages uint32) string {
	h := sha256.Sum256(fmt.Appendf(nil, "%s %d meter %d validator %s", digest, pages, metering.Version, wazeroVersion()))
	return filepath.Join(c.dir, fmt.Sprintf("%x.verdict", h[:16]))
}

// verdict is a module's metered form, or the reason of its refusal.
func (c *Cache) verdict(digest string, pages uint32) (wasm []byte, refused error, ok bool) {
	if c.dir == "" {
		return nil, nil, false
	}
	name := c.verdictKey(digest, pages)
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, nil, false
	}
	b, ok = bytes.CutPrefix(b, []byte(verdictMagic))
	if !ok || len(b) < sha256.Size+1 {
		return nil, nil, false
	}
	if sum := sha256.Sum256(b[sha256.Size:]); !bytes.Equal(sum[:], b[:sha256.Size]) {
		return nil, nil, false
	}
	b = b[sha256.Size:]
	if b[0] == 0 && !bytes.HasPrefix(b, []byte("\x00asm")) {
		return nil, errors.New(string(b[1:])), true
	}
	return b, nil, true
}

// keep stores a verdict. A failure costs time at the next start and nothing else.
func (c *Cache) keep(digest string, pages uint32, wasm []byte, refused error, log *slog.Logger) {
	if c.dir == "" {
		return
	}
	if refused != nil {
		wasm = append([]byte{0}, refused.Error()...)
	}
	sum := sha256.Sum256(wasm)
	name := c.verdictKey(digest, pages)
	err := os.WriteFile(name+".tmp", slices.Concat([]byte(verdictMagic), sum[:], wasm), 0o600)
	if err == nil {
		err = os.Rename(name+".tmp", name)
	}
	if err != nil {
		log.Warn("cannot store compiled policy; it will be compiled again", "error", err)
	}
}

// maxCacheBytes bounds the files of a cache. Opening it removes the oldest.
const maxCacheBytes = 1 << 30

func prune(dir string) {
	type file struct {
		name string
		size int64
		at   time.Time
	}
	var files []file
	var total int64
	_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name() == "lock" {
			return nil
		}
		if info, err := d.Info(); err == nil {
			files = append(files, file{name, info.Size(), info.ModTime()})
			total += info.Size()
		}
		return nil
	})
	slices.SortFunc(files, func(a, b file) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.name, b.name)) })
	for _, f := range files {
		if total <= maxCacheBytes {
			return
		}
		if os.Remove(f.name) == nil {
			total -= f.size
		}
	}
}
