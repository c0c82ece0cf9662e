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
	// Path is the library. The double serves as libcuda and as libcufile, a proxy as one of them.
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

func build() (*Double, error) {
	dir, files, err := workplace()
	if err != nil {
		return nil, err
	}
	return built(files, filepath.Join(dir, "libcuda.so.1"), "kvdouble", "double.c")
}

// Proxies builds the proxies of libcuda and libcufile that proxy.c describes, before the double, and clears their rules when
// the test ends.
func Proxies(t testing.TB) (cuda, cufile *Double) {
	t.Helper()
	double := Build(t)
	dir, files, err := workplace()
	if err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	before := func(name string, flags ...string) *Double {
		d, err := built(files, filepath.Join(dir, "proxy", name), "kvproxy", "proxy.c",
			append(flags, "-DREAL_LIBRARY=\""+double.Path+"\"", "-Wl,--no-as-needed", double.Path)...)
		if err != nil {
			t.Fatal(err)
		}
		d.Rules("")
		t.Cleanup(func() { d.Rules("") })
		return d
	}
	return before("libcuda.so.1", "-DCUDA"), before("libcufile.so.0", "-DCUDA_LIBRARY=\""+double.Path+"\"")
}

// workplace is a folder of this user's for libraries made of these sources.
func workplace() (dir string, files map[string][]byte, err error) {
	if files, err = sources(); err != nil {
		return "", nil, err
	}
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		sum.Write(files[name])
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("kvhost-double-%d-%s", os.Getuid(),
		hex.EncodeToString(sum.Sum(nil)[:8]))), files, nil
}

// built loads a library, compiled if it is not there yet. Its functions for rules have a prefix.
func built(files map[string][]byte, path, prefix, source string, flags ...string) (*Double, error) {
	d := &Double{Path: path}
	if _, err := os.Stat(path); err != nil {
		if err := compile(files, path, source, flags); err != nil {
			return nil, err
		}
	}
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	if d.rules, err = purego.Dlsym(h, prefix+"_rules"); err != nil {
		return nil, err
	}
	if d.calls, err = purego.Dlsym(h, prefix+"_calls"); err != nil {
		return nil, err
	}
	d.forget, err = purego.Dlsym(h, "kvdouble_forget") // a proxy's is the double's
	return d, err
}

// compile puts the library in place whole: other test processes may be building it too.
func compile(files map[string][]byte, path, source string, flags []string) error {
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
	cmd := exec.Command("cc",
		append([]string{"-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden",
			"-o", out, filepath.Join(tmp, source)}, append(flags, "-ldl", "-lpthread")...)...)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gdstest: %s needs a C compiler: %w\n%s", source, err, text)
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
