package policy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/kvhost/kvhost/host/kv"
)

// openBytes loads a hand-made module without its self-test, by default from the cache of all tests.
func openBytes(t testing.TB, b []byte, opt Options) (*Module, error) {
	t.Helper()
	opt.SkipSelfTest = true
	if opt.Cache == nil {
		opt.Cache = policytest.Cache(t)
	}
	m, err := load(t.Context(), "bad.wasm", newFile("", b), opt)
	if err == nil {
		t.Cleanup(func() { m.Close(t.Context()) })
	}
	return m, err
}

// open loads a hand-made module, which must be a good one.
func open(t testing.TB, a wasmtest.Assembly, opt Options) *Module {
	t.Helper()
	m, err := openBytes(t, a.Bytes(), opt)
	testenv.OK(t, err)
	return m
}

// Each of these is refused when it is opened, in words that name the module and say what to do.
func TestRefusedModules(t *testing.T) {
	evict := minimal(abi.RoleEvict)
	manifest := func(s string) wasmtest.Assembly { a := evict; a.Manifest = s; return a }
	change := func(f func(a *wasmtest.Assembly)) wasmtest.Assembly { a := evict; f(&a); return a }
	for _, c := range []struct {
		name string
		mod  []byte
		is   error
		says string
	}{
		{"empty", nil, ErrBadModule, "not a WebAssembly module"},
		{"text", []byte("(module)"), ErrBadModule, "not a WebAssembly module"},
		{"component", []byte("\x00asm\x0d\x00\x01\x00"), ErrBadModule, "build a core module"},
		{"truncated", evict.Bytes()[:40], ErrBadModule, "ends early"},
		{"no marker", evict.Without(abi.ExportMarker).Bytes(), ErrBadModule, "does not export kvhost_abi_1"},
		{"another version", evict.Without(abi.ExportMarker).With("kvhost_abi_2", ">").Bytes(), ErrBadModule, "made for ABI 2, this host speaks 1"},
		{"command", evict.With("_start", ">").Bytes(), ErrBadModule, "-buildmode=c-shared"},
		{"bare command", wasmtest.Assembly{}.With("_start", ">").Bytes(), ErrBadModule, "-buildmode=c-shared"},
		{"start section", evict.Replacing(8, []byte{0}).Bytes(), ErrBadModule, "do that work in _initialize"},
		{"no memory", change(func(a *wasmtest.Assembly) { a.NoMemory = true }).Bytes(), ErrBadModule, `one memory, exported as "memory"`},
		{"no buffers", evict.Without(abi.ExportBuffer).Bytes(), ErrBadModule, "does not export kv_buffer"},
		{"wrong signature", evict.With(abi.ExportStep, "ii>i", wasmtest.I32(0)).Bytes(), ErrBadModule, "its kv_step is (i32, i32) -> i32, want (i32, i32) -> i64"},
		{"half a role", evict.Without(abi.ExportStep).Bytes(), ErrBadModule, "kv_step is missing"},
		{"no role", evict.Without(abi.ExportStep).Without(abi.ExportEvents).Bytes(), ErrBadModule, "no role"},
		{"save only", evict.With(abi.ExportSave, "i>I", wasmtest.I64(0)).Bytes(), ErrBadModule, "only one of kv_save and kv_load"},
		{"unknown import", evict.Importing("env", "abort", "iiii>").Bytes(), ErrBadModule, "imports env.abort, which this host does not have"},
		{"import type", evict.Importing(abi.ImportModule, abi.ImportFail, "i>").Bytes(), ErrBadModule, "kvhost_1.fail as (i32), it is (i32, i32)"},
		{"ungranted", evict.Importing(abi.ImportModule, abi.ImportNow, ">I").Bytes(), ErrGrant, `the grant "clock"; its manifest`},
		{"wasi without manifest", evict.Importing(abi.ImportWASI, "sched_yield", ">i").Bytes(), ErrGrant, `the grant "wasi-stub"`},
		{"manifest asks, configuration does not", func() []byte {
			a := evict.Importing(abi.ImportModule, abi.ImportNow, ">I")
			a.Manifest = `{"name":"x","abi":1,"version":"1","roles":["evict"],"grants":["clock"]}`
			return a.Bytes()
		}(), ErrGrant, "add it to the policy's grants"},
		{"manifest text", manifest(`{"name":`).Bytes(), ErrBadModule, "manifest"},
		{"manifest ABI", manifest(`{"name":"x","version":"1","abi":9,"roles":["evict"]}`).Bytes(), ErrBadModule, "made for ABI 9"},
		{"manifest role", manifest(`{"name":"x","version":"1","abi":1,"roles":["place"]}`).Bytes(), ErrBadModule, "names role place"},
		{"manifest lacks a role", func() []byte {
			a := evict.With(abi.ExportAdmit, "ii>I", wasmtest.I64(0))
			a.Manifest = `{"name":"x","version":"1","abi":1,"roles":["evict"]}`
			return a.Bytes()
		}(), ErrBadModule, "its exports have evict, admit"},
		{"memory", change(func(a *wasmtest.Assembly) { a.Pages = 5000 }).Bytes(), ErrBadModule, "raise memory_pages"},
		{"invalid code", evict.With(abi.ExportInit, "i>i").Bytes(), ErrBadModule, "kv_init"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := openBytes(t, c.mod, Options{})
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "bad.wasm") {
				t.Errorf("opening the module: got %v, want %q", err, c.says)
			}
		})
	}
}

// Each of these starts, or fails to, with a fault that names the export; afterwards the instance is dead.
func TestFaultyEvict(t *testing.T) {
	evict := minimal(abi.RoleEvict)
	for _, c := range []struct {
		name   string
		mod    wasmtest.Assembly
		export string
		says   string
	}{
		{"trap", evict.With(abi.ExportStep, "ii>I", unreachable), abi.ExportStep, "unreachable"},
		{"trap in events", evict.With(abi.ExportEvents, "ii>i", unreachable), abi.ExportEvents, "unreachable"},
		{"status", evict.With(abi.ExportStep, "ii>I", wasmtest.Packed(abi.StatusInternal, 0)), abi.ExportStep, "status -3"},
		{"events status", evict.With(abi.ExportEvents, "ii>i", wasmtest.I32(-2)), abi.ExportEvents, "status -2"},
		{"unknown status", evict.With(abi.ExportStep, "ii>I", wasmtest.Packed(-77, 0)), abi.ExportStep, "status -77"},
		{"too many", evict.With(abi.ExportStep, "ii>I", wasmtest.Packed(0, 9)), abi.ExportStep, "answered 9 victims when asked for at most 4"},
		{"far too many", evict.With(abi.ExportStep, "ii>I", wasmtest.Packed(0, 0xffffffff)), abi.ExportStep, "at most 4"},
		{"slot out of range", evict.With(abi.ExportStep, "ii>I", store32(4096+3<<14, 100), wasmtest.Packed(0, 1)), abi.ExportStep, "slot 100, slots are below 100"},
		{"twice", evict.With(abi.ExportStep, "ii>I", wasmtest.Packed(0, 2)), abi.ExportStep, "slot 0 twice"},
		{"null buffer", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(0)), abi.ExportBuffer, "no room"},
		{"unaligned buffer", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(4104)), abi.ExportBuffer, "multiple of 16"},
		{"buffer outside", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(2<<16)), abi.ExportBuffer, "outside its memory of 131072 bytes"},
		{"buffer across the end", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(2<<16-16)), abi.ExportBuffer, "outside its memory"},
		{"negative buffer", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(-16)), abi.ExportBuffer, "outside its memory"},
		{"overlap", evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(4096)), abi.ExportBuffer, "overlap those of kind"},
		{"refuses", evict.With(abi.ExportInit, "i>i", wasmtest.I32(-1)), abi.ExportInit, "refused its settings with status -1"},
		{"initialize traps", evict.With(abi.ExportInitialize, ">", unreachable), abi.ExportInitialize, "unreachable"},
		{"recursion", evict.With(abi.ExportStep, "ii>I", wasmtest.I32(0), wasmtest.I32(0), wasmtest.Call(4)), abi.ExportStep, "used up its fuel"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := open(t, c.mod, patient)
			e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: 100})
			if err == nil {
				_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: 1})
				if c.export == abi.ExportEvents {
					err = e.Flush()
				} else {
					_, err = e.Victims(abi.Ask{Bytes: 1, MaxVictims: 4, Tenant: abi.None}, make([]uint32, 8))
				}
			}
			var f *Fault
			if !errors.As(err, &f) || !errors.Is(err, ErrFault) || f.Export != c.export || f.Module != "bad" || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v, want %q of %s", err, c.says, c.export)
			}
			if e == nil {
				return
			}
			for range 2 * sandbox.MaxBatch { // events of a dead instance go nowhere, and say so
				err = e.Event(abi.Event{Op: abi.OpTouch, Slot: 1})
			}
			if !errors.Is(err, ErrFault) || !errors.Is(e.Flush(), ErrFault) {
				t.Errorf("a dead instance took events: %v", err)
			}
			if _, err := e.Victims(abi.Ask{}, nil); !errors.Is(err, ErrFault) {
				t.Errorf("a dead instance answered: %v", err)
			}
			if s := e.Stats(); s.Faults != 1 {
				t.Errorf("%d faults counted", s.Faults)
			}
			testenv.NoError(t, e.Close())
		})
	}
}

func TestGuestWordsAndStackAreInTheFault(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportModule, abi.ImportFail, "ii>")
	a = a.With(abi.ExportStep, "ii>I", store32(64, 0x21736f6e), wasmtest.I32(64), wasmtest.I32(4), wasmtest.Call(0), unreachable)
	m := open(t, a, Options{})
	e := newEvict(t, m, 10)
	_, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, make([]uint32, 1))
	var f *Fault
	if !errors.As(err, &f) || f.Text != "nos!" || !strings.Contains(f.Stack, "$") { // by number: it has no names
		t.Errorf("the fault is %+v, want the words and stack of the guest", f)
	}
}

func TestFaultyPlace(t *testing.T) {
	const result, path = 4096 + 3<<14, 4096 + 3<<14 + 16
	answer := func(root, off, n int32, text int32) wasmtest.Assembly {
		return minimal(abi.RolePlace).With(abi.ExportPlace, "ii>I",
			store32(result, root), store32(result+4, off), store32(result+8, n), store32(path, text), wasmtest.Packed(0, 1))
	}
	const abcd, dots, slash = 0x64636261, 0x2f2e2e2f, 0x2f636261
	for _, c := range []struct {
		name string
		mod  wasmtest.Assembly
		says string
	}{
		{"no path", answer(-1, 16, 0, abcd), "empty path"},
		{"outside", answer(-1, 1<<20, 4, abcd), "outside its buffer"},
		{"wraps", answer(-1, -4, 8, abcd), "outside its buffer"},
		{"parent", answer(-1, 16, 4, dots), "component"},
		{"trailing slash", answer(-1, 16, 4, slash), "component"},
		{"binary", answer(-1, 16, 4, 0x00ff0061), "not one of"},
		{"root", answer(2, 16, 4, abcd), "chose root 2 of 2"},
		{"count", minimal(abi.RolePlace).With(abi.ExportPlace, "ii>I", wasmtest.Packed(0, 2)), "gave 2 answers to 1 query"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := open(t, c.mod, Options{})
			p, err := m.NewPlace(t.Context(), PlaceOptions{})
			testenv.OK(t, err)
			defer p.Close()
			p.SetRoots(make([]abi.RootFacts, 2))
			path, root, err := p.Path(&abi.PlaceQuery{KeyLen: 16}, []byte("kept"))
			if !errors.Is(err, ErrFault) || !strings.Contains(err.Error(), c.says) || string(path) != "kept" || root != abi.None {
				t.Fatalf("got %q on %d, %v, want %q", path, root, err, c.says)
			}
			if path, root, err = p.Path(&abi.PlaceQuery{KeyLen: 16}, []byte("kept")); string(path) != "kept" || root != abi.None || err != nil {
				t.Errorf("without a guest it gives %q on %d, %v, want the built-in name", path, root, err)
			}
			if s := p.Stats(); s.Faults != 1 || !s.Builtin {
				t.Errorf("the stats after the fault are %+v, want one fault and the built-in policy", s)
			}
		})
	}
	t.Run("good", func(t *testing.T) {
		m := open(t, answer(1, 16, 4, abcd), Options{})
		p, err := m.NewPlace(t.Context(), PlaceOptions{})
		testenv.OK(t, err)
		defer p.Close()
		p.SetRoots(make([]abi.RootFacts, 2))
		if path, root, err := p.Path(&abi.PlaceQuery{KeyLen: 16}, nil); string(path) != "abcd" || root != 1 || err != nil {
			t.Errorf("placing a piece: got %q on root %d, %v, want abcd on 1", path, root, err)
		}
	})
}

func TestGuestThatLeavesItToTheHost(t *testing.T) {
	a := minimal(abi.RolePlace).With(abi.ExportPlace, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportLayout, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportAdmit, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a})
	a.Pages = 200
	m := open(t, a, Options{})
	p, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	defer p.Close()
	if path, root, err := p.Path(&abi.PlaceQuery{KeyLen: 16}, nil); len(path) != 0 || root != abi.None || err != nil {
		t.Errorf("got the path %q on root %d, %v, want the built-in name", path, root, err)
	}
	l, err := m.NewLayout(t.Context(), LayoutOptions{})
	testenv.OK(t, err)
	defer l.Close()
	if plan, err := l.Plan(0, 0, "model=a\n", kv.Uniform(4, 2, 2, 4096)); err != nil || len(plan.Segments()) != 4 {
		t.Errorf("a plan that is left to the host: %v", err)
	}
	ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
	testenv.OK(t, err)
	defer ad.Close()
	dst := make([]bool, 600)
	if err := ad.Admit(make([]abi.Candidate, 600), dst); err != nil || !dst[599] {
		t.Errorf("candidates that are left to the host: the last admitted: %v, %v", dst[599], err)
	}
}

func TestBadLayoutAndAdmission(t *testing.T) {
	a := minimal(abi.RoleLayout).With(abi.ExportLayout, "ii>I", wasmtest.Packed(0, 3)).
		With(abi.ExportAdmit, "ii>I", []byte{0x20, 0, 0xad}). // answers n, but with what stands in RESULT
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a})
	a.Pages = 200
	m := open(t, a, Options{})
	l, err := m.NewLayout(t.Context(), LayoutOptions{})
	testenv.OK(t, err)
	defer l.Close()
	plan, err := l.Plan(0, 0, "", kv.Uniform(4, 2, 2, 4096))
	if err != nil || len(plan.Segments()) != 4 {
		t.Errorf("the built-in layout did not answer: %v", err)
	}
	if s := l.Stats(); s.Faults != 1 || !s.Builtin {
		t.Errorf("the stats of the layout are %+v, want one fault and the built-in policy", s)
	}
	ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
	testenv.OK(t, err)
	defer ad.Close()
	dst := []bool{true, true}
	if err := ad.Admit(make([]abi.Candidate, 2), dst); err != nil || dst[0] || dst[1] {
		t.Errorf("admitting two candidates: got %v, %v, want neither", dst, err)
	}
	if err := ad.Namespace(5000, ""); !errors.Is(err, ErrNamespace) {
		t.Errorf("a namespace out of range: got %v, want %v", err, ErrNamespace)
	}
}

func TestOpenByName(t *testing.T) {
	if _, err := Open(t.Context(), "no-such-policy", Options{}); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "no-such-policy") {
		t.Errorf("opening an unknown name: got %v, want %v", err, ErrNotFound)
	}
	if _, err := Open(t.Context(), "./no/such.wasm", Options{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("opening a missing file: got %v, want %v", err, ErrNotFound)
	}
	dir := t.TempDir()
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "mine.wasm"), minimal(abi.RoleEvict).Bytes(), 0o600))
	for _, name := range []string{"mine", "mine.wasm", filepath.Join(dir, "mine.wasm")} {
		m, err := Open(t.Context(), name, Options{Dir: dir, Cache: policytest.Cache(t)})
		testenv.OK(t, err)
		if m.Name() != "mine" || len(m.Digest()) != 64 || !m.Has(abi.RoleEvict) || m.Has(abi.RolePlace) {
			t.Errorf("%s opens as module %s with digest %s", name, m.Name(), m.Digest())
		}
		if _, err := m.NewPlace(t.Context(), PlaceOptions{}); !errors.Is(err, ErrRole) {
			t.Errorf("placing with an evict policy: got %v, want %v", err, ErrRole)
		}
		m.Close(t.Context())
	}
}

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		config Config
		says   string
	}{
		{Config{"width": "2/1"}, `fanout has no setting "width" (it has widths)`},
		{Config{"widths": "9"}, "want one to four levels"},
	} {
		_, err := modules["fanout"].NewPlace(t.Context(), PlaceOptions{Config: c.config})
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("starting with %v: got %v, want %q", c.config, err, c.says)
		}
	}
	for kind, value := range map[string]string{"int": "1.5", "float": "x", "bool": "maybe"} {
		err := Config{"k": value}.check("m", map[string]abi.Option{"k": {Type: kind}})
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "want type "+kind) {
			t.Errorf("%q as a setting of type %s: got %v", value, kind, err)
		}
	}
	if _, err := (Config{"a=b": ""}).text(); !errors.Is(err, ErrConfig) {
		t.Errorf("a setting with = in its key: got %v, want %v", err, ErrConfig)
	}
}

// mortal is a module with all roles whose calls trap when a candidate's, query's or plane's first word is 13.
func mortal() wasmtest.Assembly {
	word := wasmtest.Join(wasmtest.I32(4096+2<<14), []byte{0x28, 2, 0}, wasmtest.I32(13), []byte{0x46, 0x04, 0x40, 0x00, 0x0b}) // if load(ARGS) == 13 { unreachable }
	a := minimal(abi.RoleAdmit).
		With(abi.ExportAdmit, "ii>I", word, []byte{0x20, 0, 0xad}).
		With(abi.ExportPlace, "ii>I", word, wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportLayout, "ii>I", word, wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(14), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a})
	a.Pages = 40
	return a
}

func TestAdmitComesBack(t *testing.T) {
	m := open(t, mortal(), Options{})
	synctest.Test(t, func(t *testing.T) {
		ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
		testenv.OK(t, err)
		defer ad.Close()
		ask := func(key uint64) (bool, bool) {
			dst := []bool{false}
			testenv.OK(t, ad.Admit([]abi.Candidate{{Key: key}}, dst))
			return dst[0], ad.Stats().Builtin
		}
		if yes, builtin := ask(1); yes || builtin { // the guest's own answer is what stands in RESULT: no
			t.Error(yes, builtin)
		}
		if yes, builtin := ask(13); !yes || !builtin {
			t.Error("the built-in policy did not answer at once:", yes, builtin)
		}
		if yes, builtin := ask(1); !yes || !builtin {
			t.Error("the built-in policy does not answer on:", yes, builtin)
		}
		time.Sleep(2 * firstPause)
		synctest.Wait()
		if yes, builtin := ask(1); yes || builtin {
			t.Error("the module did not come back:", yes, builtin)
		}
		for n := 2; n <= maxFaults; n++ {
			if yes, _ := ask(13); !yes {
				t.Error("no answer at fault", n)
			}
			time.Sleep(firstPause << n)
			synctest.Wait()
		}
		if err := m.Quarantined(); !errors.Is(err, ErrQuarantine) || !errors.Is(err, ErrFault) {
			t.Errorf("after %d faults: %v", maxFaults, err)
		}
		time.Sleep(time.Hour)
		if yes, builtin := ask(1); !yes || !builtin {
			t.Error("a module in quarantine answers:", yes, builtin)
		}
		if got := ad.Stats().Faults; got != maxFaults {
			t.Errorf("%d faults", got)
		}
	})
}

func TestFaultsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &Module{name: "m", log: NativeModule("", nil, nil).log, code: &sandbox.Code{}}
		for range 3 * maxFaults {
			if v, pause := m.Failed(abi.RoleEvict, ErrFault); v != Restart || pause != firstPause {
				t.Fatal(v, pause)
			}
			time.Sleep(faultWindow + time.Second)
		}
		for n := range maxFaults {
			v, pause := m.Failed(abi.RoleEvict, ErrFault)
			if last := n == maxFaults-1; last != (v == Quarantine) || !last && pause != firstPause<<n {
				t.Error(n, v, pause)
			}
		}
	})
}

func TestLayoutAndPlaceComeBack(t *testing.T) {
	m := open(t, mortal(), Options{})
	synctest.Test(t, func(t *testing.T) {
		p, err := m.NewPlace(t.Context(), PlaceOptions{})
		testenv.OK(t, err)
		defer p.Close()
		for id := range uint32(20) {
			testenv.OK(t, p.Namespace(id, "x\n"))
		}
		path := func(ns uint32) error {
			_, _, err := p.Path(&abi.PlaceQuery{Namespace: ns, KeyLen: 16}, nil)
			return err
		}
		testenv.NoError(t, path(1))
		if err := path(13); !errors.Is(err, ErrFault) {
			t.Error(err)
		}
		if err := path(13); err != nil || !p.Stats().Builtin {
			t.Error("the built-in name is not used at once:", err)
		}
		time.Sleep(2 * firstPause)
		synctest.Wait()
		if err := path(1); err != nil || p.Stats().Builtin {
			t.Error("the module did not come back:", err)
		}
		for m.Quarantined() == nil {
			if err := path(13); !errors.Is(err, ErrFault) {
				t.Fatal("no guest is started any more:", err)
			}
			time.Sleep(firstPause << maxFaults)
			synctest.Wait()
		}
		time.Sleep(time.Hour)
		if err := path(13); err != nil || !p.Stats().Builtin {
			t.Error("a module in quarantine is asked:", err)
		}
	})
}

func TestStopOnFault(t *testing.T) {
	var why []error
	m := open(t, mortal(), Options{OnFault: Stop, Stop: func(err error) { why = append(why, err) }})
	ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
	testenv.OK(t, err)
	defer ad.Close()
	l, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	defer l.Close()
	if err := ad.Admit([]abi.Candidate{{Key: 13}}, make([]bool, 1)); !errors.Is(err, ErrFault) {
		t.Errorf("the call that faults: got %v, want %v", err, ErrFault)
	}
	if err := ad.Admit([]abi.Candidate{{Key: 1}}, make([]bool, 1)); !errors.Is(err, ErrFault) {
		t.Errorf("a call after the fault: got %v, want %v", err, ErrFault)
	}
	if _, _, err := l.Path(&abi.PlaceQuery{Namespace: 13, KeyLen: 8}, nil); !errors.Is(err, ErrFault) {
		t.Errorf("a call of another role after the fault: got %v, want %v", err, ErrFault)
	}
	if len(why) != 1 || !errors.Is(why[0], ErrFault) || !errors.Is(why[0], ErrQuarantine) {
		t.Errorf("told %v", why)
	}
}

// grower takes all memory that it gets, page by page, in kv_init. It stays legal unless it traps at the end.
func grower(trap bool) wasmtest.Assembly {
	grow := wasmtest.Join([]byte{0x03, 0x40}, wasmtest.I32(1), []byte{0x40, 0}, wasmtest.I32(-1), []byte{0x47, 0x0d, 0, 0x0b}) // until memory.grow says -1
	end := wasmtest.I32(0)
	if trap {
		end = unreachable
	}
	a := minimal(abi.RoleEvict).With(abi.ExportInit, "i>i", grow, end)
	a.Manifest = `{"name":"grower","version":"1","abi":1,"roles":["evict"],"memory_pages":65536}`
	return a
}

func TestOperatorLimitsMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		opt   Options
		slots uint32
		want  uint64
	}{
		{"default", Options{}, 0, 64 << 20},
		{"default with slots", Options{}, 1 << 20, 192 << 20},
		{"the operator's", Options{MemoryPages: 100}, 1 << 20, 100 << 16},
		{"more than the default", Options{MemoryPages: 5000}, 0, 5000 << 16},
	} {
		p, err := open(t, grower(false), c.opt).Probe(t.Context(), ProbeOptions{Role: abi.RoleEvict, MaxSlots: c.slots})
		testenv.OK(t, err)
		if got := p.MemoryBytes(); got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
		p.Close()
	}
}

// All instances together stay within one budget, whatever their modules, and give it back.
func TestMemoryBudget(t *testing.T) {
	budget := sandbox.NewMemoryBudget(80 << 20)
	opt := Options{Memory: budget}
	options := ProbeOptions{Role: abi.RoleEvict}
	first, err := open(t, grower(false), opt).Probe(t.Context(), options)
	testenv.OK(t, err)
	second, err := open(t, grower(false), opt).Probe(t.Context(), options)
	testenv.OK(t, err)
	if budget.Used() != 80<<20 || first.MemoryBytes()+second.MemoryBytes() != 80<<20 {
		t.Errorf("%d used, by %d and %d", budget.Used(), first.MemoryBytes(), second.MemoryBytes())
	}
	if _, err := open(t, minimal(abi.RoleEvict), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 1}); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "policy_memory") {
		t.Errorf("without any memory left: %v", err)
	}
	second.Close()
	_, err = open(t, grower(true), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 1})
	if !errors.Is(err, ErrFault) || !strings.Contains(err.Error(), "policy_memory allows 80 for all policies") {
		t.Errorf("a guest that traps for want of memory: %v", err)
	}
	first.Close()
	if used := budget.Used(); used != 0 {
		t.Errorf("%d bytes used by nobody", used)
	}
}

// What each role's instances have adds up to what all have, also where an instance takes over from another. In a bubble, none does before its
// pause has been looked at.
func TestMemoryOfEachRole(t *testing.T) { synctest.Test(t, memoryOfEachRole) }

func memoryOfEachRole(t *testing.T) {
	budget := sandbox.NewMemoryBudget(80 << 20)
	opt := Options{Memory: budget}
	state := State{Format: "k/1", Data: word(1)}
	evict, err := open(t, keeper(abi.RoleEvict, "k/1"), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 10, State: state})
	if err != nil || !evict.Loaded() {
		t.Fatal(err)
	}
	admit, err := open(t, keeper(abi.RoleAdmit, "k/1"), opt).NewAdmit(t.Context(), AdmitOptions{State: state})
	testenv.OK(t, err)
	m := open(t, mortal(), opt)
	place, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	of := func(s Stats) uint64 { return s.Memory }
	e, a, p := of(evict.Stats()), of(admit.Stats()), of(place.Stats())
	if e == 0 || a == 0 || p == 0 || e+a+p != budget.Used() {
		t.Errorf("evict %d, admit %d, place %d, all %d", e, a, p, budget.Used())
	}
	if _, _, err := place.Path(&abi.PlaceQuery{Namespace: 13, KeyLen: 16}, nil); !errors.Is(err, ErrFault) || of(place.Stats()) != 0 {
		t.Errorf("%d bytes after %v", of(place.Stats()), err)
	}
	evict.Close()
	admit.Close()
	place.Close()
	if e, a := of(evict.Stats()), of(admit.Stats()); e+a+budget.Used() != 0 {
		t.Errorf("at the end: evict %d, admit %d, all %d", e, a, budget.Used())
	}
}
