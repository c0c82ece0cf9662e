// Package gdstest builds a double of libcuda and libcufile, so that the code which calls them runs, and meets every fault,
// on machines without a GPU. Only tests use it, and no figure comes from it.
package gdstest

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/internal/kernels"
)

//go:embed c
var parts embed.FS

// sources are the double's parts by name, with the checksum and the codec that it shares with the kernels.
func sources() (map[string][]byte, error) {
	files, err := parts.ReadDir("c")
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{"xxh3.h": []byte(kernels.XXH3), "huffman.h": []byte(kernels.Huffman)}
	for _, f := range files {
		if out[f.Name()], err = parts.ReadFile("c/" + f.Name()); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// UUID is the double's only GPU.
const UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"

// Double is a built library. It is one per process, so its rules are too: tests that set them do not run in parallel.
type Double struct {
	// Path is the library. It serves as libcuda and as libcufile.
	Path string

	rules, calls, forget uintptr
}

var (
	mu   sync.Mutex
	only *Double
)

// Build compiles the double with the system's C compiler (cc), once, and clears its rules now and when the test ends. The
// test is skipped when there is no compiler.
func Build(t testing.TB) *Double {
	t.Helper()
	testenv.Need(t, testenv.CC)
	mu.Lock()
	defer mu.Unlock()
	if only == nil {
		d, err := build()
		if err != nil {
			t.Fatal(err)
		}
		only = d
	}
	only.Rules("")
	t.Cleanup(func() { only.Rules("") })
	return only
}

// build loads the library from a folder of this user's, compiled if it is not there yet.
func build() (*Double, error) {
	files, err := sources()
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		sum.Write(files[name])
	}
	d := &Double{Path: filepath.Join(os.TempDir(), fmt.Sprintf("kvhost-double-%d-%s", os.Getuid(),
		hex.EncodeToString(sum.Sum(nil)[:8])), "libcuda.so.1")}
	if _, err := os.Stat(d.Path); err != nil {
		if err := compile(files, d.Path); err != nil {
			return nil, err
		}
	}
	h, err := purego.Dlopen(d.Path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	for name, to := range map[string]*uintptr{"rules": &d.rules, "calls": &d.calls, "forget": &d.forget} {
		if *to, err = purego.Dlsym(h, "kvdouble_"+name); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// compile puts the library in place whole: other test processes may be building it too.
func compile(files map[string][]byte, path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, "build")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(tmp, name), text, 0o600); err != nil {
			return err
		}
	}
	out := filepath.Join(tmp, "made.so")
	cmd := exec.Command("cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden",
		"-o", out, filepath.Join(tmp, "double.c"), "-ldl", "-lpthread")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gdstest: double.c needs a C compiler: %w\n%s", err, text)
	}
	return os.Rename(out, path)
}

// Rules replaces the fault rules, written as double.c says, and sets the call counters to 0.
func (d *Double) Rules(text string) {
	b := append([]byte(text), 0)
	purego.SyscallN(d.rules, uintptr(unsafe.Pointer(&b[0])))
}

// Calls is how often a function was called since the rules were set.
func (d *Double) Calls(function string) int {
	b := append([]byte(function), 0)
	n, _, _ := purego.SyscallN(d.calls, uintptr(unsafe.Pointer(&b[0])))
	return int(n)
}

// Forget drops what a lost GPU has left registered, and closes cuFile's driver. No other GPU of the double may be open.
func (d *Double) Forget() { purego.SyscallN(d.forget) }
