// Package policytest builds policies to wasm for tests: outside the checkout, from its sources, without a network. It
// also has the cache of what tests compile.
package policytest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Dir builds first-party policies (all directories under plugins/ when none is named) and returns the directory with
// their .wasm files, for policy.Options.Dir. What one run built the next one finds.
func Dir(t testing.TB, names ...string) string {
	t.Helper()
	dir, err := Build(names...)
	testenv.OK(t, err)
	return dir
}

var (
	mu    sync.Mutex
	built = map[string]bool{}
)

// Build is Dir for a TestMain.
func Build(names ...string) (string, error) {
	mu.Lock()
	defer mu.Unlock()
	dir, err := cacheDir("policies")
	if err != nil {
		return "", err
	}
	key := strings.Join(names, " ")
	if built[key] {
		return dir, nil
	}
	args := []string{"run", "./plugins/internal/build", "-o", dir}
	for _, n := range names {
		args = append(args, filepath.Join("plugins", n))
	}
	if err := run(testenv.Root(), nil, "go", args...); err != nil {
		return "", err
	}
	built[key] = true
	return dir, nil
}

// Overlay builds all first-party policies and returns a file for go build -overlay: the command that is built has them
// embedded, whatever the checkout has.
func Overlay() (string, error) {
	mu.Lock()
	defer mu.Unlock()
	dir, err := cacheDir("embedded")
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, run(testenv.Root(), nil, "go", "run", "./plugins/internal/build", "-overlay", overlay)
}

// Example builds a plugin of examples/plugins with its own Makefile, and returns the path of its module. The test is
// skipped when the machine lacks the toolchain of its language.
func Example(t testing.TB, name string) string {
	t.Helper()
	source := filepath.Join(testenv.Root(), "examples", "plugins", name)
	testenv.Need(t, testenv.Make)
	switch {
	case exists(source, "Cargo.toml"):
		testenv.Need(t, testenv.Cargo)
	default:
		testenv.Need(t, testenv.Clang)
	}
	path, err := buildExample(name)
	testenv.OK(t, err)
	return path
}

func exists(parts ...string) bool {
	_, err := os.Stat(filepath.Join(parts...))
	return err == nil
}

// buildExample works on copies, where the kits stand as they do in the checkout. Make finds what is up to date.
func buildExample(name string) (string, error) {
	mu.Lock()
	defer mu.Unlock()
	dir, err := cacheDir("examples")
	if err != nil {
		return "", err
	}
	target := filepath.Join("examples", "plugins", name)
	module := filepath.Join(dir, target, name+".wasm")
	if built[module] {
		return module, nil
	}
	unlock, err := lock(dir)
	if err != nil {
		return "", err
	}
	defer unlock()
	for _, part := range []string{"abi/c", "abi/rust", target} {
		if err := refresh(filepath.Join(testenv.Root(), part), filepath.Join(dir, part)); err != nil {
			return "", err
		}
	}
	host := filepath.Join(dir, "kvhost")
	if err := run(testenv.Root(), []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-tags=grpcnotrace", "-o", host, "./cmd/kvhost"); err != nil {
		return "", err
	}
	err = run(filepath.Join(dir, target), nil, "make", "KVHOST="+host)
	if err != nil {
		return "", err
	}
	built[module] = true
	return module, nil
}

// cacheDir is where this checkout's tests keep what they built: other checkouts have other sources.
func cacheDir(what string) (string, error) {
	return sharedDir(filepath.Join(fmt.Sprintf("%x", sha256.Sum256([]byte(testenv.Root())))[:12], what))
}

// sharedDir is where the tests of all checkouts keep what is named by its content.
func sharedDir(what string) (string, error) {
	if testenv.Root() == "" {
		return "", errors.New("policytest: not in a checkout, or no go command")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = filepath.Join(os.TempDir(), fmt.Sprintf("kvhost-%d", os.Geteuid()))
	}
	dir := filepath.Join(cache, "kvhost-test", what)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("policytest: %w", err)
	}
	return dir, nil
}

// lock keeps test processes apart that build in the same directory.
func lock(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("policytest: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("policytest: lock %s: %w", dir, err)
	}
	return func() { f.Close() }, nil
}

func run(dir string, environment []string, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "GOFLAGS="), environment...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("policytest: %s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
