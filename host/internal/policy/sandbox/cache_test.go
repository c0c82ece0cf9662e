package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/tetratelabs/wazero"
)

// sourceOf is a module of one exported function whose code is given, without the final end.
func sourceOf(t *testing.T, cache *Cache, code ...byte) *Source {
	t.Helper()
	lengths := func(b []byte) []byte { // with a length of four bytes
		n := len(b)
		return append([]byte{byte(n) | 0x80, byte(n>>7) | 0x80, byte(n>>14) | 0x80, byte(n >> 21)}, b...)
	}
	body := lengths(append(append([]byte{0}, code...), 0x0b))
	wasm := slices.Concat([]byte("\x00asm\x01\x00\x00\x00"), []byte{1, 4, 1, 0x60, 0, 0}, []byte{3, 2, 1, 0},
		[]byte{7, 5, 1, 1, 'f', 0, 0}, []byte{10}, lengths(append([]byte{1}, body...)))
	scan, err := ScanModule(wasm)
	testenv.OK(t, err)
	return &Source{
		Name: "m", Digest: fmt.Sprintf("%x", code[:min(len(code), 8)]), Bytes: wasm, Scan: scan, Pages: 1,
		Log: slog.New(slog.DiscardHandler), Cache: cache,
	}
}

// bomb is code that takes seconds to compile.
func bomb() []byte {
	const depth = 5_000
	return append(bytes.Repeat([]byte{opLoop, empty}, depth), bytes.Repeat([]byte{opEnd}, depth)...)
}

// A module that is compiled for seconds delays neither other modules nor other hosts with the same cache, and can be
// cancelled.
func TestCompilingDelaysNobody(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	a, errA := OpenCache(dir)
	b, errB := OpenCache(dir) // as another host would
	testenv.OK(t, errors.Join(errA, errB))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := Compile(ctx, sourceOf(t, a, bomb()...))
		ended <- err
	}()
	working := func() int {
		names, err := filepath.Glob(filepath.Join(dir, workPrefix+"*"))
		testenv.NoError(t, err)
		return len(names)
	}
	testenv.Until(t, "a compilation", func() bool { return working() > 0 })
	for i, cache := range []*Cache{a, b} {
		c, err := Compile(t.Context(), sourceOf(t, cache, 0x41, byte(i), 0x1a))
		testenv.OK(t, err)
		testenv.NoError(t, c.Close(t.Context()))
	}
	select {
	case err := <-ended:
		t.Fatalf("the module was compiled before the others: %v", err)
	default:
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled compilation ended with %v", err)
	}
	if working() != 0 {
		t.Error("a directory was left")
	}
}

// What is in the cache needs no child process, and thus no time.
func TestCachedModulesNeedNoCompiler(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	compile := func(most time.Duration) error {
		src := sourceOf(t, cache, 0x41, 7, 0x1a)
		src.Compile = CompileLimits{Time: most}
		c, err := Compile(t.Context(), src)
		if err != nil {
			return err
		}
		return c.Close(t.Context())
	}
	if err := compile(1); !errors.Is(err, ErrLimit) { // no child is so quick
		t.Errorf("compiling in 1 ns: got %v, want %v", err, ErrLimit)
	}
	testenv.OK(t, compile(0))
	if err := compile(1); err != nil {
		t.Errorf("it was compiled again: %v", err)
	}
}

// A host compiles where it can write.
func TestWorkDirectories(t *testing.T) {
	testenv.Need(t, testenv.SharedMemory)
	writable := t.TempDir()
	t.Setenv("TMPDIR", "/proc/none")
	for _, c := range []struct{ dir, in string }{{"", "/dev/shm"}, {"/proc", "/dev/shm"}, {writable, ""}} {
		cache := &Cache{dir: c.dir}
		dir, err := cache.workDir()
		testenv.OK(t, err)
		defer os.RemoveAll(dir)
		if in := filepath.Dir(dir); in != c.in && in != c.dir {
			t.Errorf("cache %q: %s", c.dir, dir)
		}
		if err := private(dir); err != nil { // it holds code that will run
			t.Error(err)
		}
	}
	code, err := Compile(t.Context(), sourceOf(t, &Cache{dir: "/proc"}, 0x41, 9, 0x1a))
	testenv.OK(t, err)
	testenv.NoError(t, code.Close(t.Context()))
}

// A killed host leaves its directory, which a later one removes.
func TestPruneRemovesOldCompilations(t *testing.T) {
	dir := t.TempDir()
	old, recent := filepath.Join(dir, workPrefix+"1"), filepath.Join(dir, workPrefix+"2")
	long := time.Now().Add(-2 * workAge)
	if err := errors.Join(os.Mkdir(old, 0o700), os.Mkdir(recent, 0o700), os.WriteFile(filepath.Join(old, "x"), nil, 0o600),
		os.Chtimes(old, long, long), os.Chmod(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCache(dir); err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob(dir + "/*")
	if err != nil || len(names) != 1 || !strings.HasSuffix(names[0], "2") {
		t.Errorf("left: %v, %v", names, err)
	}
}

// The compiler, which has read a module, hands over the machine code of that module alone.
func TestForeignCodeIsNotTaken(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	mine, other := cache.entry(sourceOf(t, cache, 1)), cache.entry(sourceOf(t, cache, 2))
	if mine == other {
		t.Fatal("two modules have one entry")
	}
	work, err := cache.workDir()
	testenv.OK(t, err)
	code := filepath.Join(work, "wazero-x")
	testenv.OK(t, errors.Join(os.Mkdir(code, 0o700), os.WriteFile(filepath.Join(code, "a"), nil, 0o600)))
	log := slog.New(slog.DiscardHandler)
	testenv.OK(t, os.WriteFile(filepath.Join(code, "b"), nil, 0o600))
	if mine.takeCode(work, log) {
		t.Error("took two files")
	}
	testenv.OK(t, os.Remove(filepath.Join(code, "b")))
	if !mine.takeCode(work, log) {
		t.Error("did not take one")
	}
	names, err := filepath.Glob(filepath.Join(cache.dir, "*", "*", "*"))
	if err != nil || len(names) != 1 || !strings.HasPrefix(names[0], mine.dir) {
		t.Errorf("the cache has the files %v, %v, want one of the module", names, err)
	}
}

// What opens the same module with one cache at the same time has its machine code once, for as long as one of them has it.
func TestMachineCodeIsShared(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	compile := func(code ...byte) *Code {
		t.Helper()
		c, err := Compile(t.Context(), sourceOf(t, cache, code...))
		testenv.OK(t, err)
		return c
	}
	first, second, other := compile(0x01), compile(0x01), compile(0x01, 0x01)
	if first.machineCode != second.machineCode {
		t.Error("the same module was loaded twice")
	}
	if other.machineCode == first.machineCode {
		t.Error("two modules share their machine code")
	}
	testenv.OK(t, first.Close(t.Context()))
	if third := compile(0x01); third.machineCode != second.machineCode {
		t.Error("code in use was loaded again")
	} else if err := third.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := second.runtime.InstantiateModule(t.Context(), second.compiled, wazero.NewModuleConfig().WithName("")); err != nil {
		t.Errorf("code that one still has: %v", err)
	}
	testenv.OK(t, errors.Join(second.Close(t.Context()), other.Close(t.Context())))
	if len(cache.inUse) != 0 {
		t.Errorf("%d modules are still loaded", len(cache.inUse))
	}
}

func TestMachineCodeIsSharedConcurrently(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	src := sourceOf(t, cache, 0x01)
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 20 {
				c, err := Compile(t.Context(), src)
				if err != nil {
					t.Error(err)
					return
				}
				mod, err := c.runtime.InstantiateModule(t.Context(), c.compiled, wazero.NewModuleConfig().WithName(""))
				if err == nil {
					err = mod.Close(t.Context())
				}
				if err = errors.Join(err, c.Close(t.Context())); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	if len(cache.inUse) != 0 {
		t.Errorf("%d modules are still loaded", len(cache.inUse))
	}
}
