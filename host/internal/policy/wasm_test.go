package policy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/layermajor"
	"github.com/kvhost/kvhost/plugins/lru"
)

// The first-party policies: each as a module, and the same source linked natively.
var (
	modules = map[string]*Module{}
	natives = map[string]*Module{
		"lru":        NativeModule("lru", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return lru.New(i) }),
		"fifo":       NativeModule("fifo", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return fifo.New(i) }),
		"fanout":     NativeModule("fanout", []abi.Role{abi.RolePlace}, func(i guest.Info) (any, error) { return fanout.New(i) }),
		"layermajor": NativeModule("layermajor", []abi.Role{abi.RoleLayout}, func(i guest.Info) (any, error) { return layermajor.New(i) }),
	}
	distDir string
)

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (int, error) {
	var names []string
	for name := range natives {
		names = append(names, name)
	}
	dir, err := policytest.Build(names...)
	if err != nil {
		return 1, err
	}
	distDir = dir
	ctx := context.Background()
	cache, err := policytest.OpenCache()
	if err != nil {
		return 1, err
	}
	for _, name := range names {
		if modules[name], err = Open(ctx, name, Options{Dir: dir, Cache: cache}); err != nil {
			return 1, err
		}
		defer modules[name].Close(ctx)
	}
	return m.Run(), nil
}

// stream is a random but legal stream of events over a slot space: what is resident is tracked here.
type stream struct {
	rng      *rand.Rand
	resident []uint32
	at       []int // of each slot in resident, or -1
	pins     []bool
	free     []uint32
	time     uint64
	tenants  uint32
}

func newStream(seed uint64, slots uint32) *stream {
	s := &stream{rng: rand.New(rand.NewPCG(seed, 1)), tenants: 3}
	for i := range slots {
		s.at = append(s.at, -1)
		s.free = append(s.free, slots-1-i)
	}
	s.pins = make([]bool, slots)
	return s
}

func (s *stream) next() abi.Event {
	s.time += 1000
	ev := abi.Event{Parent: abi.None, Time: s.time, Request: uint32(s.time / 64000)}
	roll := s.rng.IntN(100)
	if len(s.resident) == 0 || (roll < 25 && len(s.free) > 0) {
		ev.Op, ev.Slot = abi.OpInsert, s.free[len(s.free)-1]
		if roll == 0 {
			ev.Op = abi.OpResident
		}
		ev.Key, ev.Size, ev.Tenant = s.rng.Uint64(), 1+s.rng.Uint32N(64), s.rng.Uint32N(s.tenants)
		s.free = s.free[:len(s.free)-1]
		s.at[ev.Slot] = len(s.resident)
		s.resident = append(s.resident, ev.Slot)
		return ev
	}
	ev.Slot = s.resident[s.rng.IntN(len(s.resident))]
	switch {
	case roll < 80:
		ev.Op = abi.OpTouch
	case roll < 86:
		ev.Op = abi.OpPin
		s.pins[ev.Slot] = true
	case roll < 92:
		ev.Op = abi.OpUnpin
		s.pins[ev.Slot] = false
	case roll < 94:
		ev.Op = abi.OpLink
	case roll < 95:
		ev.Op, ev.Slot = abi.OpRequestEnd, abi.None
	default:
		return s.remove(ev.Slot)
	}
	return ev
}

func (s *stream) remove(slot uint32) abi.Event {
	i, last := s.at[slot], s.resident[len(s.resident)-1]
	s.resident[i], s.at[last] = last, i
	s.resident = s.resident[:len(s.resident)-1]
	s.at[slot], s.pins[slot] = -1, false
	s.free = append(s.free, slot)
	return abi.Event{Op: abi.OpRemove, Slot: slot, Parent: abi.None, Time: s.time}
}

func (s *stream) ask() abi.Ask {
	a := abi.Ask{Bytes: uint64(1+s.rng.Uint32N(200)) * abi.SizeUnit, MaxVictims: 1 + s.rng.Uint32N(16), Tenant: abi.None}
	if s.rng.IntN(3) == 0 {
		a.Tenant = s.rng.Uint32N(s.tenants + 1)
	}
	return a
}

func newEvict(t testing.TB, m *Module, slots uint32) *Evict {
	t.Helper()
	e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: slots, Capacity: 1 << 30, Seed: 7})
	testenv.OK(t, err)
	t.Cleanup(func() { e.Close() })
	return e
}

func openCache(t testing.TB, dir string) *sandbox.Cache {
	t.Helper()
	c, err := sandbox.OpenCache(dir)
	testenv.OK(t, err)
	return c
}

func only(t testing.TB, pattern string) string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) != 1 {
		t.Fatalf("files like %s: got %v, %v, want one", pattern, names, err)
	}
	return names[0]
}

// A module that was compiled before is taken from the cache, works, and is compiled anew when what was kept is damaged.
func TestCacheKeepsModules(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	use := func() {
		t.Helper()
		m, err := openBytes(t, minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", unreachable).Bytes(), Options{Cache: openCache(t, dir)})
		testenv.OK(t, err)
		e := newEvict(t, m, 10)
		testenv.NoError(t, e.Event(abi.Event{}))
		if _, err := e.Victims(abi.Ask{MaxVictims: 1}, make([]uint32, 1)); !errors.Is(err, ErrFault) {
			t.Error(err)
		}
		if e.Stats().Fuel == 0 {
			t.Error("not metered")
		}
	}
	use()
	verdict, machine := only(t, dir+"/*.module/verdict"), only(t, dir+"/*.module/wazero-*/*")
	info, err := os.Stat(verdict)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info.Mode(), err)
	}
	use()
	again, err := os.Stat(verdict)
	if err != nil || again.ModTime() != info.ModTime() {
		t.Error("the verdict was made anew", err)
	}
	for _, name := range []string{verdict, machine} {
		b, err := os.ReadFile(name)
		testenv.OK(t, err)
		for _, at := range []int{0, len(b) / 2, len(b) - 1} {
			bad := append([]byte{}, b...)
			bad[at] ^= 1
			if name == machine && at == len(b)/2 {
				bad = bad[:at]
			}
			testenv.OK(t, os.WriteFile(name, bad, 0o600))
			use()
		}
	}
}

func TestCacheKeepsRefusals(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	var texts []string
	for range 2 {
		_, err := openBytes(t, minimal(abi.RoleEvict).With(abi.ExportInit, "i>i").Bytes(), Options{Cache: openCache(t, dir)})
		if !errors.Is(err, ErrBadModule) {
			t.Fatal(err)
		}
		texts = append(texts, err.Error())
	}
	if texts[0] != texts[1] || !strings.Contains(texts[0], "kv_init") {
		t.Errorf("the refusal and the cached one are %q", texts)
	}
	if b, err := os.ReadFile(only(t, dir+"/*.module/verdict")); err != nil || !strings.Contains(string(b), "kv_init") {
		t.Errorf("the stored verdict is %q, %v", b, err)
	}
}

// A start that is cancelled does not blame the module.
func TestCancelledCompilation(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := load(ctx, "x.wasm", newFile("", minimal(abi.RoleEvict).Bytes()), Options{})
	if !errors.Is(err, context.Canceled) || errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), "x.wasm") {
		t.Errorf("loading with a cancelled context: got %v", err)
	}
}

func TestCacheMustBePrivate(t *testing.T) {
	open := t.TempDir()
	testenv.OK(t, os.Chmod(open, 0o775))
	file := filepath.Join(t.TempDir(), "file")
	testenv.OK(t, os.WriteFile(file, nil, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	testenv.OK(t, os.Symlink(open, link))
	for dir, says := range map[string]string{open: "chmod 700", link: "not a directory", file: "not a directory", file + "/x": ""} {
		if _, err := sandbox.OpenCache(dir); !errors.Is(err, ErrCache) || !strings.Contains(err.Error(), says) {
			t.Errorf("opening a cache in %s: got %v, want %q", dir, err, says)
		}
	}
	readable := t.TempDir() // as other programs of this user make ~/.cache/kvhost
	testenv.OK(t, os.Chmod(readable, 0o755))
	if _, err := sandbox.OpenCache(readable); err != nil {
		t.Errorf("opening a cache that others may read: got %v, want none", err)
	}
	if os.Geteuid() == 0 {
		other := filepath.Join(t.TempDir(), "other")
		testenv.OK(t, errors.Join(os.Mkdir(other, 0o700), os.Chown(other, 12345, 12345)))
		if _, err := sandbox.OpenCache(other); !errors.Is(err, ErrCache) || !strings.Contains(err.Error(), "another user") {
			t.Error(err)
		}
	}
}

// A cache has the code of modules that are open, and on disk that of others: a host that swaps for years keeps no more.
func TestClosedModulesLeaveNothing(t *testing.T) {
	testenv.Slow(t)
	for _, dir := range []string{"", filepath.Join(t.TempDir(), "c")} {
		cache := openCache(t, dir)
		code := func() (bytes uint64) { // it is mapped, and nothing else that may be executed has no file
			for range 4 {
				runtime.GC()
				time.Sleep(10 * time.Millisecond)
			}
			b, err := os.ReadFile("/proc/self/maps")
			testenv.OK(t, err)
			for line := range strings.Lines(string(b)) {
				var from, to uint64
				if f := strings.Fields(line); len(f) == 5 && strings.Contains(f[1], "x") {
					if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err != nil {
						t.Fatal(err)
					}
					bytes += to - from
				}
			}
			return bytes
		}
		open := func(n int) {
			a := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", wasmtest.I32(int32(n)), drop, wasmtest.I64(0))
			m, err := load(t.Context(), "x.wasm", newFile("", a.Bytes()), Options{Cache: cache})
			if err == nil {
				err = m.Close(t.Context())
			}
			testenv.OK(t, err)
		}
		open(0)
		before := code()
		const n = 60
		for i := range n {
			open(i + 1)
		}
		if after := code(); after > before+n/3*4096 {
			t.Errorf("cache %q: %d bytes of code, %d after %d modules more were opened and closed", dir, before, after, n)
		}
	}
}
