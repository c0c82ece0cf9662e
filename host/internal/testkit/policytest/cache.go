package policytest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Cache is the cache of compiled modules for tests of anything but caches and the compiler. To compile a module takes a
// process, and for a first-party policy a second of processor time, or ten under the race detector. What one test
// compiled all others find, in other packages and in later runs too.
func Cache(t testing.TB) *sandbox.Cache {
	t.Helper()
	cache, err := OpenCache()
	testenv.OK(t, err)
	return cache
}

// OpenCache is Cache for a TestMain.
func OpenCache() (*sandbox.Cache, error) {
	dir, err := CacheDir()
	if err != nil {
		return nil, err
	}
	return sandbox.OpenCache(dir)
}

// CacheDir is the directory of [Cache], for a host's configuration.
var CacheDir = sync.OnceValues(func() (string, error) {
	all, err := sharedDir("compiled")
	if err != nil {
		return "", err
	}
	sources, err := digestOfHost()
	if err != nil {
		return "", fmt.Errorf("policytest: %w", err)
	}
	dirs, _ := filepath.Glob(filepath.Join(all, "*")) // the pattern is right
	for _, dir := range dirs {
		// Tests of sources that have been changed since may still run.
		info, err := os.Stat(dir)
		if err == nil && time.Since(info.ModTime()) > maxAge {
			err = os.RemoveAll(dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("policytest: %w", err)
		}
	}
	return filepath.Join(all, sources[:16]), nil
})

// maxAge is how long what was compiled is kept, after the last that was added to it.
const maxAge = 3 * 24 * time.Hour

// digestOfHost is a digest of the sources on which the content of the cache depends. The cache's own keys have versions
// that are raised by hand, and a test must not pass because of what an older host compiled.
func digestOfHost() (string, error) {
	h := sha256.New()
	for _, pattern := range []string{"go.sum", "abi/*.go", "host/internal/policy/*.go", "host/internal/policy/*/*.go"} {
		names, err := filepath.Glob(filepath.Join(testenv.Root(), pattern))
		if err != nil {
			return "", err
		}
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			b, err := os.ReadFile(name)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, "%s %d\n%s", filepath.Base(name), len(b), b)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}
