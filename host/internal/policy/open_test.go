package policy

import (
	"bytes"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/tetratelabs/wazero/sys"
	"golang.org/x/sys/unix"
)

// What stands at a module's path, or at its signature's, may be no file at all. None of it may hold up who opens it.
func TestOddFilesAreRefused(t *testing.T) {
	key, _ := newKey(t)
	module := minimal(abi.RoleEvict).Bytes()
	odd := map[string]func(path string) error{
		"a FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a device":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a socket": func(path string) error {
			l, err := net.Listen("unix", path)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		},
		"a huge file": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40))
		},
	}
	for name, place := range odd {
		for _, of := range []string{"module", "signature"} {
			t.Run(name+" as "+of, func(t *testing.T) {
				dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv") // a socket's path must be short
				testenv.OK(t, err)
				t.Cleanup(func() { os.RemoveAll(dir) })
				path := filepath.Join(dir, "m.wasm")
				at, is := path, ErrBadModule
				if of == "signature" {
					at, is = path+SignatureSuffix, ErrSignature
					err = os.WriteFile(path, module, 0o600)
				}
				testenv.OK(t, errors.Join(err, place(at)))
				done := started(func() error {
					_, err := Open(t.Context(), path, Options{PublicKey: key.String()})
					return err
				})
				if err := testenv.Receive(t, "the end of opening it", done); !errors.Is(err, is) || !strings.Contains(err.Error(), at) {
					t.Errorf("opening it: got %v, want %v that names %s", err, is, at)
				}
			})
		}
	}
}

func started(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

func inspect(t *testing.T, b []byte, opt Options) *Inspection {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.wasm")
	testenv.OK(t, os.WriteFile(path, b, 0o600))
	i, err := Inspect(t.Context(), path, opt)
	testenv.OK(t, err)
	if i.Path != path || i.Digest != digestOf(b) || i.Bytes != len(b) {
		t.Errorf("the inspection of %s is %+v", path, i)
	}
	return i
}

func TestInspect(t *testing.T) {
	a := keeper(abi.RoleEvict, "k/1").Importing(abi.ImportModule, abi.ImportNow, ">I").Importing(abi.ImportModule, abi.ImportFail, "ii>").Importing("env", "x", ">")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["clock"],"state_format":"k/1","memory_pages":7,"fuel":{"call":1000000,"record":2}}`
	i := inspect(t, a.Bytes(), Options{Grants: []string{"clock"}})
	if i.Name != "mine" || i.Manifest == nil || i.StateFormat != "k/1" || !reflect.DeepEqual(i.Roles, []abi.Role{abi.RoleEvict}) ||
		i.MemoryPages != 2 || i.MostPages != 7 || i.Fuel != (sandbox.Fuel{Call: 1_500_000, Record: 2_000, Time: 3 * time.Millisecond}) || i.Batch == 0 {
		t.Errorf("the inspection of the keeper is %+v", i)
	}
	want := []sandbox.Import{
		{Module: abi.ImportModule, Name: abi.ImportNow, Type: "() -> i64", Grant: abi.GrantClock, Known: true},
		{Module: abi.ImportModule, Name: abi.ImportFail, Type: "(i32, i32)", Known: true}, {Module: "env", Name: "x", Type: "()"},
	}
	if !reflect.DeepEqual(i.Imports, want) || !reflect.DeepEqual(i.Grants(), []string{abi.GrantClock}) {
		t.Errorf("its imports are %+v, want %+v", i.Imports, want)
	}
	if !errors.Is(i.Refused, ErrBadModule) {
		t.Errorf("an unknown import: %v", i.Refused)
	}
	for _, c := range i.Counts {
		if c.What == "functions" && c.Got != uint64(len(a.Funcs)+len(a.Imports)) || c.Most == 0 {
			t.Errorf("a count is %+v", c)
		}
	}
	if i := inspect(t, minimal(abi.RoleLayout).Bytes(), Options{}); i.Refused != nil || i.Manifest != nil || i.Name != "m" {
		t.Errorf("the inspection of a module without a manifest is %+v", i)
	}
	if i := inspect(t, []byte("no module"), Options{}); !errors.Is(i.Refused, ErrBadModule) {
		t.Errorf("the inspection of text is %+v, want %v", i, ErrBadModule)
	}
	if i := inspect(t, a.Bytes(), Options{SHA256: "ab"}); !errors.Is(i.Refused, ErrDigest) || i.Name != "mine" {
		t.Errorf("the inspection with another digest is %+v, want %v", i, ErrDigest)
	}
	if i := inspect(t, minimal(abi.RoleEvict).With(metering.Global, ">").Bytes(), Options{}); !errors.Is(i.Refused, metering.ErrReserved) {
		t.Errorf("the inspection of a reserved export is %+v, want %v", i, metering.ErrReserved)
	}
	if i, err := Inspect(t.Context(), "lru", Options{Dir: distDir}); err != nil || i.Refused != nil || i.Digest != modules["lru"].Digest() {
		t.Errorf("the inspection of lru is %+v, %v", i, err)
	}
}

// The module is closed with the last reference, and once.
func TestHandle(t *testing.T) {
	var closed int
	m := open(t, minimal(abi.RoleEvict), Options{})
	h := NewHandle(m, "", nil, func(of *Module, err error) {
		if of != m || err != nil {
			t.Errorf("%s closed: %v", of.Name(), err)
		}
		closed++
	})
	if h.Label != m.Name() || h.Module != m {
		t.Errorf("the handle is of %s, named %s", h.Module.Name(), h.Label)
	}
	if h.Acquire() != h {
		t.Error("another handle")
	}
	h.Release()
	if closed != 0 {
		t.Error("closed with a reference left")
	}
	h.Release()
	if closed != 1 {
		t.Errorf("closed %d times", closed)
	}
	for what, misuse := range map[string]func(){"release": h.Release, "acquire": func() { h.Acquire() }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s of a closed handle went unnoticed", what)
				}
			}()
			misuse()
		}()
	}
}

// legalPath has the rules of a path, one after the other.
func legalPath(path []byte) bool {
	parts := strings.Split(string(path), "/")
	if len(path) > MaxPath || len(parts) > maxPathComponents {
		return false
	}
	for _, part := range parts {
		if part == "" || len(part) > maxPathComponentSize || part[0] == '.' {
			return false
		}
		for _, c := range []byte(part) {
			if !pathChars[c] {
				return false
			}
		}
	}
	return true
}

// TestPathsAreCheckedWhole compares the check, which looks at eight bytes together, with the rules: a byte that is not
// plain, at each place of a path.
func TestPathsAreCheckedWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	legal := 0
	for range 200_000 {
		path := bytes.Repeat([]byte("a"), 1+rng.IntN(40))
		if rng.IntN(20) == 0 {
			path = bytes.Repeat([]byte("a"), 240+rng.IntN(30))
		}
		for range rng.IntN(4) {
			path[rng.IntN(len(path))] = "/./.z\x00~/"[rng.IntN(8)]
		}
		want := legalPath(path)
		if got := pathError(path) == ""; got != want {
			t.Fatalf("%q: %v, by the rules %v: %s", path, got, want, pathError(path))
		}
		if want {
			legal++
		}
	}
	if legal < 20_000 || legal > 180_000 {
		t.Errorf("%d legal paths", legal)
	}
}

var (
	unreachable = []byte{0x00}
	drop        = []byte{0x1a}
)

func store32(addr, v int32) []byte {
	return wasmtest.Join(wasmtest.I32(addr), wasmtest.I32(v), []byte{0x36, 2, 0})
}

// minimal is a module that is legal and does nothing: kv_buffer gives 16 KiB to each kind.
func minimal(role abi.Role) wasmtest.Assembly {
	buffer := wasmtest.Join([]byte{0x20, 0}, wasmtest.I32(14), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}) // (kind << 14) + 4096
	a := wasmtest.Assembly{Pages: 2}.With(abi.ExportMarker, ">").With(abi.ExportBuffer, "ii>i", buffer).
		With(abi.ExportInit, "i>i", wasmtest.I32(0))
	for _, name := range role.Exports() {
		body := wasmtest.I64(0)
		if wasmtest.Signatures[name] == "ii>i" {
			body = wasmtest.I32(0)
		}
		a = a.With(name, wasmtest.Signatures[name], body)
	}
	return a
}

// A Go guest that panics writes to standard error and exits: the fault carries its words, and so does the log.
func TestStandardErrorAndExit(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportWASI, "fd_write", "iiii>i").Importing(abi.ImportWASI, "proc_exit", "i>")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["wasi-stub"]}`
	a = a.With(abi.ExportStep, "ii>I",
		store32(64, 128), store32(68, 5), store32(128, 0x706f6f6c), store32(132, '\n'), // one vector: "loop\n"
		wasmtest.I32(2), wasmtest.I32(64), wasmtest.I32(1), wasmtest.I32(80), wasmtest.Call(0), []byte{0x1a},
		wasmtest.I32(2), wasmtest.Call(1), unreachable)
	var log bytes.Buffer
	m, err := openBytes(t, a.Bytes(), Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.OK(t, err)
	e := newEvict(t, m, 10)
	_, err = e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, make([]uint32, 1))
	var f *Fault
	var exit *sys.ExitError
	if !errors.As(err, &f) || f.Text != "loop" || f.Reason != "exited with code 2" || !errors.As(err, &exit) || f.Module != "mine" {
		t.Errorf("the fault of a guest that exits is %+v", err)
	}
	if !strings.Contains(log.String(), "text=loop") || !strings.Contains(log.String(), "policy=mine") {
		t.Errorf("log: %s", log.String())
	}
}

// Two instances with one seed draw the same lots, whatever other instances do.
func TestSeededRandom(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportModule, abi.ImportRand, ">I")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["random"]}`
	result := wasmtest.I32(4096 + 3<<14)
	a = a.With(abi.ExportStep, "ii>I", result, wasmtest.Call(0), []byte{0x42, 0xff, 0x00, 0x83, 0x37, 3, 0}, wasmtest.Packed(0, 1)) // slot = rand & 127
	if _, err := openBytes(t, a.Bytes(), Options{}); !errors.Is(err, ErrGrant) {
		t.Fatalf("random numbers without a grant: got %v, want %v", err, ErrGrant)
	}
	m, err := openBytes(t, a.Bytes(), Options{Grants: []string{abi.GrantRandom}})
	testenv.OK(t, err)
	draw := func(seed uint64) (out [8]uint32) {
		e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: 128, Seed: seed})
		testenv.OK(t, err)
		defer e.Close()
		for i := range out {
			if _, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, out[i:i+1]); err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	first, again, other := draw(1), draw(1), draw(2)
	if first != again || first == other {
		t.Errorf("seed 1 draws %v and then %v, seed 2 %v", first, again, other)
	}
}
