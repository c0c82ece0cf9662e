package policy

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

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
			err := tried(t, c.mod, Options{})
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
