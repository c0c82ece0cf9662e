package policy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// Where minimal's buffers lie.
const (
	argsAt   = 4096 + abi.BufferArgs<<14
	resultAt = 4096 + abi.BufferResult<<14
	stateAt  = 4096 + abi.BufferState<<14
)

var (
	load32 = func(addr int32) []byte { return wasmtest.Join(wasmtest.I32(addr), []byte{0x28, 2, 0}) }
	// keeps saves the word at RESULT, and takes over any state of four bytes but 13, at which it traps, 14, which it
	// cannot read, and 15, over which it loops.
	keepsSave = wasmtest.Join(wasmtest.I32(stateAt), load32(resultAt), []byte{0x36, 2, 0}, wasmtest.Packed(0, 4))
	keepsLoad = wasmtest.Join(
		load32(stateAt), wasmtest.I32(13), []byte{0x46, 0x04, 0x40, 0x00, 0x0b},
		load32(stateAt), wasmtest.I32(14), []byte{0x46, 0x04, 0x40}, wasmtest.I32(1), []byte{0x0f, 0x0b},
		load32(stateAt), wasmtest.I32(15), []byte{0x46, 0x04, 0x40}, wasmtest.Loop(), []byte{0x0b},
		wasmtest.I32(resultAt), load32(stateAt), []byte{0x36, 2, 0}, wasmtest.I32(0))
)

func keeper(role abi.Role, format string) wasmtest.Assembly {
	a := minimal(role).With(abi.ExportSave, "i>I", keepsSave).With(abi.ExportLoad, "i>i", keepsLoad)
	a.Manifest = `{"name":"keeper","version":"1","abi":1,"roles":["` + role.String() + `"],"state_format":"` + format + `"}`
	return a
}

func word(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

func TestEvictStateGoesOn(t *testing.T) {
	a := keeper(abi.RoleEvict, "k/1").With(abi.ExportStep, "ii>I", wasmtest.Packed(0, 1))
	m := open(t, a, Options{})
	first := func(e *Evict) uint32 {
		t.Helper()
		var dst [1]uint32
		if n, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, dst[:]); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		return dst[0]
	}
	for _, c := range []struct {
		name   string
		state  State
		loaded bool
		slot   uint32
	}{
		{"none", State{}, false, 0},
		{"its own", State{"k/1", 10, word(7)}, true, 7},
		{"of fewer slots", State{"k/1", 9, word(7)}, true, 7},
		{"of more slots", State{"k/1", 11, word(7)}, false, 0},
		{"of another form", State{"k/2", 10, word(7)}, false, 0},
		{"that it cannot read", State{"k/1", 10, word(14)}, false, 0},
		{"that it fails at", State{"k/1", 10, word(13)}, false, 0},
		{"that it never finishes", State{"k/1", 10, word(15)}, false, 0},
		{"for which it has no room", State{"k/1", 10, make([]byte, 1<<20)}, false, 0},
	} {
		e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: 10, State: c.state})
		if err != nil {
			t.Fatal(c.name, err)
		}
		if e.Loaded() != c.loaded {
			t.Errorf("%s: loaded %v", c.name, e.Loaded())
		}
		if got := first(e); got != c.slot {
			t.Errorf("%s: slot %d", c.name, got)
		}
		s, ok, err := e.Save(64)
		if err != nil || !ok || s.Format != "k/1" || s.Slots != 10 || !bytes.Equal(s.Data, word(c.slot)) {
			t.Errorf("%s: kept %+v %v %v", c.name, s, ok, err)
		}
		if f := e.Stats().Faults; f != 0 {
			t.Errorf("%s: %d faults", c.name, f)
		}
		e.Close()
		if _, _, err := e.Save(64); !errors.Is(err, ErrClosed) {
			t.Errorf("saving a closed instance: got %v, want %v", err, ErrClosed)
		}
	}
	testenv.NoError(t, m.Quarantined())
}

func TestStateThatIsNotKept(t *testing.T) {
	save := func(body ...[]byte) wasmtest.Assembly {
		return keeper(abi.RoleEvict, "k/1").With(abi.ExportSave, "i>I", body...)
	}
	for name, c := range map[string]struct {
		mod  wasmtest.Assembly
		says string
	}{
		"no state":         {minimal(abi.RoleEvict), ""},
		"nothing to say":   {save(wasmtest.Packed(1, 0)), ""},
		"no room":          {save(wasmtest.Packed(0, 4)).With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(5), []byte{0x46, 0x04, 0x40}, wasmtest.I32(0), []byte{0x0f, 0x0b, 0x20, 0}, wasmtest.I32(14), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}), ""},
		"more than it may": {save(wasmtest.Packed(0, 65)), "kept 65 bytes of state when given 64"},
		"trap":             {save(unreachable), "unreachable"},
		"loop":             {save(wasmtest.Loop(), unreachable), "used up its fuel"},
		"status":           {save(wasmtest.Packed(-3, 0)), "status -3"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEvict(t, open(t, c.mod, patient), 10)
			_, ok, err := e.Save(64)
			if ok || (err == nil) != (c.says == "") {
				t.Fatal(ok, err)
			}
			var f *Fault
			if err != nil && (!errors.As(err, &f) || f.Export != abi.ExportSave || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("saving: got %v, want %q", err, c.says)
			}
			if _, err := e.Victims(abi.Ask{}, nil); (err == nil) != (c.says == "") {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

func TestAdmitStateGoesOn(t *testing.T) {
	m := open(t, keeper(abi.RoleAdmit, "k/1").With(abi.ExportAdmit, "ii>I", wasmtest.Packed(0, 1)), Options{})
	for _, c := range []struct {
		word   uint32
		loaded bool
		answer bool
	}{{1, true, true}, {0, true, false}, {13, false, false}, {14, false, false}} {
		a, err := m.NewAdmit(t.Context(), AdmitOptions{State: State{Format: "k/1", Data: word(c.word)}})
		testenv.OK(t, err)
		defer a.Close()
		dst := []bool{true}
		if err := a.Admit(make([]abi.Candidate, 1), dst); err != nil || dst[0] != c.answer || a.Loaded() != c.loaded || a.Stats().Faults != 0 {
			t.Errorf("%d: %v %v, loaded %v, %+v", c.word, dst, err, a.Loaded(), a.Stats())
		}
		if s, ok, err := a.Save(4); err != nil || !ok || s.Format != "k/1" || len(s.Data) != 4 {
			t.Errorf("%d: kept %+v %v %v", c.word, s, ok, err)
		}
	}
}

// counting is a native guest that keeps how many events it saw.
type counting struct{ n uint32 }

func (c *counting) Events(batch []abi.Event)      { c.n += uint32(len(batch)) }
func (c *counting) Victims(abi.Ask, []uint32) int { return 0 }
func (c *counting) Admit([]abi.Candidate, []bool) { c.n++ }
func (c *counting) Save(dst []byte, limit int) ([]byte, error) {
	return binary.LittleEndian.AppendUint32(dst, c.n), nil
}
func (c *counting) Load(b []byte) error {
	if len(b) != 4 {
		return errors.New("not four bytes")
	}
	c.n = binary.LittleEndian.Uint32(b)
	return nil
}

func TestNativeStateGoesOn(t *testing.T) {
	m := NativeModule("counting", []abi.Role{abi.RoleEvict, abi.RoleAdmit}, func(guest.Info) (any, error) { return &counting{}, nil }).KeepState("c/1")
	e := newEvict(t, m, 1)
	for range 300 {
		_ = e.Event(abi.Event{})
	}
	s, ok, err := e.Save(4)
	if err != nil || !ok || !bytes.Equal(s.Data, word(300)) {
		t.Fatal(s, ok, err)
	}
	if _, ok, err := e.Save(3); ok || err != nil {
		t.Error("four bytes in three:", ok, err)
	}
	next, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: 1, State: s})
	if err != nil || !next.Loaded() || next.guest.(*counting).n != 300 {
		t.Error(err)
	}
	next, err = m.NewEvict(t.Context(), EvictOptions{MaxSlots: 1, State: State{"c/1", 1, []byte{1}}})
	if err != nil || next.Loaded() {
		t.Error(err)
	}
	a, err := m.NewAdmit(t.Context(), AdmitOptions{State: State{"c/1", 0, word(5)}})
	if err != nil || !a.Loaded() {
		t.Fatal(err)
	}
	if s, ok, err := a.Save(4); err != nil || !ok || !bytes.Equal(s.Data, word(5)) {
		t.Error(s, ok, err)
	}
}

// tried is a hand-made module loaded as a host would.
func tried(t testing.TB, a wasmtest.Assembly, opt Options) error {
	t.Helper()
	opt.Cache = policytest.Cache(t)
	m, err := load(t.Context(), "bad.wasm", newFile("", a.Bytes()), opt)
	if err == nil {
		m.Close(context.Background())
	}
	return err
}

// What cannot do its work is refused when it is loaded, and the reason is named.
func TestSelfTestRefuses(t *testing.T) {
	evict, place := minimal(abi.RoleEvict), mortal().Without(abi.ExportAdmit).Without(abi.ExportLayout)
	pages := func(a wasmtest.Assembly) wasmtest.Assembly { a.Pages = 200; return a }
	const result = 4096 + 3<<14
	onePath := wasmtest.Join(store32(result, -1), store32(result+4, 16), store32(result+8, 4), store32(result+16, 0x64636261), wasmtest.Packed(0, 1))
	for name, c := range map[string]struct {
		mod  wasmtest.Assembly
		says string
	}{
		"trap":                    {evict.With(abi.ExportEvents, "ii>i", unreachable), "as evict: policy: fault: bad: kv_events"},
		"trap at an ask":          {evict.With(abi.ExportStep, "ii>I", unreachable), "kv_step"},
		"loop":                    {evict.With(abi.ExportStep, "ii>I", wasmtest.Loop(), wasmtest.I64(0)), "used up its fuel"},
		"does not start":          {evict.With(abi.ExportInitialize, ">", unreachable), "_initialize"},
		"no buffers":              {evict.With(abi.ExportBuffer, "ii>i", wasmtest.I32(0)), "kv_buffer"},
		"a slot that cannot be":   {evict.With(abi.ExportStep, "ii>I", store32(result, 5000), wasmtest.Packed(0, 1)), "slot 5000"},
		"place: trap":             {place.With(abi.ExportPlace, "ii>I", unreachable), "as place"},
		"place: no answer":        {place.With(abi.ExportPlace, "ii>I", wasmtest.Packed(0, 0)), "gave 0 answers"},
		"place: one path for all": {place.With(abi.ExportPlace, "ii>I", onePath), "twice: for namespace 0, group 0, rank 0"},
		"admit: trap":             {pages(minimal(abi.RoleAdmit).With(abi.ExportAdmit, "ii>I", unreachable)), "as admit"},
		"layout: nothing":         {roomy(abi.RoleLayout), "as layout"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tried(t, c.mod, patient)
			if !errors.Is(err, ErrSelfTest) || !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "bad.wasm") {
				t.Errorf("loading the module: got %v, want %q", err, c.says)
			}
		})
	}
}

// A role that wants settings is judged where it gets them.
func TestSelfTestLeavesSettingsToTheRole(t *testing.T) {
	testenv.NoError(t, tried(t, minimal(abi.RoleEvict).With(abi.ExportInit, "i>i", wasmtest.I32(-1)), Options{}))
}

// Counters of the self-test are discarded.
func TestSelfTestLeavesNoTrace(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportModule, abi.ImportCounterAdd, "iI>").Importing(abi.ImportModule, abi.ImportLog, "iii>")
	a = a.With(abi.ExportStep, "ii>I", wasmtest.I32(0), wasmtest.I64(1), wasmtest.Call(0), wasmtest.I32(3), wasmtest.I32(64), wasmtest.I32(4), wasmtest.Call(1), wasmtest.I64(0))
	a.Manifest = `{"name":"m","version":"1","abi":1,"roles":["evict"],"grants":["metrics"],"counters":["steps"]}`
	var said bytes.Buffer
	m, err := load(t.Context(), "m.wasm", newFile("", a.Bytes()), Options{
		Grants: []string{"metrics"}, Log: slog.New(slog.NewTextHandler(&said, nil)),
	})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	if n := m.Counters()["steps"]; n != 0 || strings.Contains(said.String(), "text=") || m.Quarantined() != nil {
		t.Errorf("%d counted by the self-test, and it logged %s", n, said.String())
	}
	for range 2 { // instances share what they count
		e := newEvict(t, m, 10)
		for range 3 {
			if _, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, make([]uint32, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := m.Counters()["steps"]; n != 6 {
		t.Errorf("%d steps counted, want 6", n)
	}
}

// A policy decides and uses what it does without being looked at, and what is seen of it adds up to all that it used.
func TestObservedPolicyIsTheSame(t *testing.T) {
	testenv.Slow(t)
	profile := &sandbox.Profile{}
	m, err := Open(t.Context(), "lru", Options{Dir: distDir, Cache: policytest.Cache(t), Profile: profile})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	var seen Call // sums
	o := EvictOptions{MaxSlots: 300, Capacity: 1 << 30, Seed: 7, Observe: func(c *Call) error {
		seen.Events = append(seen.Events, c.Events...)
		seen.Victims = append(seen.Victims, c.Victims...)
		if seen.Fuel += c.Fuel; c.Fuel == 0 || c.Fuel > c.Allowed || c.Time <= 0 || c.Err != nil {
			t.Errorf("a call: want fuel within its limit, time and no error, got %+v", c)
		}
		return nil
	}}
	e, err := m.NewEvict(t.Context(), o)
	testenv.OK(t, err)
	defer e.Close()
	plain, s := newEvict(t, modules["lru"], 300), newStream(1, 300)
	start, events := e.Stats().Fuel, 0
	for range 3000 {
		ev := s.next()
		events++
		testenv.OK(t, errors.Join(e.Event(ev), plain.Event(ev)))
		if events%7 != 0 {
			continue
		}
		ask := s.ask()
		got, want := make([]uint32, 16), make([]uint32, 16)
		n, err := e.Victims(ask, got)
		testenv.OK(t, err)
		k, err := plain.Victims(ask, want)
		testenv.OK(t, err)
		if !slices.Equal(got[:n], want[:k]) || !slices.Equal(seen.Victims, got[:n]) {
			t.Fatalf("victims: want %v, got %v and seen were %v", want[:k], got[:n], seen.Victims)
		}
		seen.Victims = nil
	}
	testenv.OK(t, errors.Join(e.Flush(), plain.Flush()))
	if used := e.Stats().Fuel; used != plain.Stats().Fuel || seen.Fuel != used-start || len(seen.Events) != events {
		t.Errorf("fuel: want %d in all, %d after the start, for %d events; got %d, %d, %d", plain.Stats().Fuel, used-start, events,
			used, seen.Fuel, len(seen.Events))
	}
	var own uint64
	for _, f := range profile.Functions() {
		own += f.Fuel
		if f.Function == abi.ExportStep && f.Export == abi.ExportStep && (f.Calls != uint64(events/7) || f.Whole < f.Fuel) {
			t.Errorf("kv_step: want %d calls, got %+v", events/7, f)
		}
	}
	if own != e.Stats().Fuel {
		t.Errorf("the functions' fuel: want %d in all, got %d", e.Stats().Fuel, own)
	}
	o.Observe = func(*Call) error { return ErrClosed }
	e, err = m.NewEvict(t.Context(), o)
	testenv.OK(t, err)
	if _, err := e.Victims(s.ask(), make([]uint32, 1)); !errors.Is(err, ErrClosed) || !e.Ended() {
		t.Errorf("an observer's error: want it to end the policy, got %v", err)
	}
}
