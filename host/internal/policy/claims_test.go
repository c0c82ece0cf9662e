package policy

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policy/wasmtest"
)

// A decoder must not reserve memory for what a module only claims to have. Each of these claims 2^22 of something in
// a few bytes. Names are for people: a module whose names claim too much is loaded.
func TestClaimsReserveNothing(t *testing.T) {
	names := []string{"function names", "functions with local names", "local names", "a function's name", "the module's name",
		"a name subsection"}
	tried := 0
	for _, c := range wasmtest.Modules() {
		claimed, is := strings.CutSuffix(c.Name, ": 4194304")
		if c.Class != "claims" || !is {
			continue
		}
		tried++
		t.Run(claimed, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			m, err := openBytes(t, c.Wasm, Options{Cache: &sandbox.Cache{}})
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > 2<<20 {
				t.Errorf("a module of %d bytes took %d bytes of memory, want at most %d", len(c.Wasm), n, 2<<20)
			}
			if loads := slices.Contains(names, claimed); (err == nil) != loads || err != nil && !errors.Is(err, ErrBadModule) {
				t.Errorf("opening the module: got %v, %v, want it to load: %t", m, err, loads)
			}
		})
	}
	if tried < 25 {
		t.Errorf("tried %d claims, want at least 25", tried)
	}
}

// A module's names are shown to people, also where it is refused because of one of its sections.
func TestNamesOfSectionsAreFitForPeople(t *testing.T) {
	name := abi.ManifestSection
	twice := minimal(abi.RoleEvict).Ending(wasmtest.Custom(name), wasmtest.Custom(name))
	if _, err := openBytes(t, twice.Bytes(), Options{}); err == nil || !strings.Contains(err.Error(), "custom "+name+" section: there are two") {
		t.Errorf("opening a module with two manifests: got %v", err)
	}
	evil := "\x1b]0;owned\a\r\n\x00\u202e" + strings.Repeat("z", 900)
	if n := (&meter.Section{Name: evil}).String(); len(n) > 200 || strings.ContainsFunc(n, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("the name of a section has %d bytes: %.300q", len(n), n)
	}
}
