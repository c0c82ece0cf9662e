package sandbox

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// Cache stores the results of loading a module: its metered form or the reason of its refusal, and wazero's machine
// code. Processes may share the directory. It needs no lock: files are published by renaming, and two processes that
// compile the same module at the same time publish the same files. Equal modules of one process also share their
// machine code in memory.
type Cache struct {
	sharedCode
	dir string // empty: nothing is stored
}

// CacheDir returns the user's cache directory: $XDG_CACHE_HOME/kvhost, or .cache/kvhost at home. It is empty if neither
// is known.
func CacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "kvhost")
}

// OpenCache opens a cache in a directory, which it makes with mode 0700 if missing. With an empty dir it stores
// nothing. The directory's content is run as code, so it must belong to this user, and no other user may write to it.
// Otherwise the error is [ErrCache].
func OpenCache(dir string) (*Cache, error) {
	if dir == "" {
		return &Cache{}, nil
	}
	dir, err := filepath.Abs(dir) // the compiling process has another working directory
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w; set policy_cache to a directory that this user may write to", ErrCache, err)
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
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("%w: %s has mode %#o: others may write to it, and could have this user run anything; chmod 700 it", ErrCache, dir, mode)
	}
	return nil
}

// workDir makes a directory for one compilation, in the cache or else among temporary files. Like the cache it belongs
// to this user alone.
func (c *Cache) workDir() (string, error) {
	var errs []error
	for _, place := range compileDirs(c.dir) {
		dir, err := os.MkdirTemp(place, workPrefix+"*")
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("%w: compiling needs a directory that this user may write to; set policy_cache or TMPDIR: %w",
		ErrCache, errors.Join(errs...))
}

// compileDirs returns the directories that workDir tries.
func compileDirs(cache string) []string {
	places := []string{cache, os.TempDir(), "/dev/shm"}
	if cache == "" {
		places = places[1:]
	}
	return places
}

// workPrefix begins the names of directories in which modules are compiled. One that is older than workAge was left by
// a host that was killed.
const (
	workPrefix = "kvhost-compiling-"
	workAge    = time.Hour
)

// entry is the cache's directory for one module. The module's machine code is in no other directory, so that the compiler,
// which has read the module, cannot replace the code of another one.
type entry struct {
	dir string // empty: nothing is stored
}

// entry returns the entry of a module. Its name is a hash of the inputs of the metered form and the machine code: the
// module, the meter and wazero. wazero itself adds the processor's features to the name of its file.
func (c *Cache) entry(src *Source) entry {
	if c.dir == "" || src.Profile != nil {
		return entry{}
	}
	h := sha256.Sum256(fmt.Appendf(nil, "%s %d meter %d validator %s %s", src.Digest, src.Pages, metering.Version,
		wazeroVersion(), runtime.GOARCH))
	return entry{filepath.Join(c.dir, fmt.Sprintf("%x.module", h[:16]))}
}

// A verdict file is the magic, the SHA-256 of the rest, and then a module's metered form or, after a NUL, the reason of
// its refusal. Any other file is ignored.
const (
	verdictMagic = "kvhost policy verdict 2\n"
	verdictFile  = "verdict"
)

// verdict returns a module's metered form, or the reason for its refusal. ok is false if neither is stored.
func (e entry) verdict() (wasm []byte, refused error, ok bool) {
	if e.dir == "" {
		return nil, nil, false
	}
	b, err := os.ReadFile(filepath.Join(e.dir, verdictFile))
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
		return nil, newRefusal(string(b[1:])), true
	}
	return b, nil, true
}

// keep stores a verdict. A failure only costs time at the next start.
func (e entry) keep(wasm []byte, refused error, log *slog.Logger) {
	if e.dir == "" {
		return
	}
	if refused != nil {
		wasm = append([]byte{0}, refused.Error()...)
	}
	sum := sha256.Sum256(wasm)
	err := os.MkdirAll(e.dir, 0o700)
	if err == nil {
		err = regular.Replace(filepath.Join(e.dir, verdictFile), slices.Concat([]byte(verdictMagic), sum[:], wasm), 0o600)
	}
	if err != nil {
		log.Warn("cannot store compiled policy; it will be compiled again", "error", err)
	}
}

// takeCode moves the machine code from the directory of a compilation to the entry.
func (e entry) takeCode(dir string, log *slog.Logger) bool {
	if e.dir == "" {
		return false
	}
	files, err := filepath.Glob(filepath.Join(dir, "wazero-*", "*"))
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("%d files of machine code", len(files))
	}
	if err == nil {
		parent := filepath.Join(e.dir, filepath.Base(filepath.Dir(files[0])))
		if err = os.MkdirAll(parent, 0o700); err == nil {
			err = os.Rename(files[0], filepath.Join(parent, filepath.Base(files[0])))
		}
	}
	if err != nil {
		log.Warn("cannot store compiled policy; it will be compiled again", "error", err)
	}
	return err == nil
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
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), workPrefix) {
			if info, err := d.Info(); err == nil && time.Since(info.ModTime()) > workAge {
				_ = os.RemoveAll(name)
			}
			return fs.SkipDir
		}
		if err != nil || !d.Type().IsRegular() {
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
			_ = os.Remove(filepath.Dir(f.name)) // fails unless it is empty
		}
	}
}
