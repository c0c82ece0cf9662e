package policy

import (
	"encoding/binary"
	"errors"
	"runtime"
	"strings"
	"testing"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

func uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

func custom(name string, body ...[]byte) []byte {
	return wasmSection(0, append(wasmString(name), bodyOf(body...)...))
}

// insert puts a section in front of the first one with an id that is not lower.
func insert(module []byte, before byte, section []byte) []byte {
	at := 8
	for at < len(module) && (module[at] == 0 || module[at] < before) {
		n, k := binary.Uvarint(module[at+1:])
		at += 1 + k + int(n)
	}
	return bodyOf(module[:at], section, module[at:])
}

// A decoder must not reserve memory for what a module only claims to have. Each module here claims 2^22 of something in
// a few bytes; more would end the test process where the claim is believed.
func TestClaimsReserveNothing(t *testing.T) {
	const claim = 1 << 22
	evict := minimal(abi.RoleEvict).bytes()
	end := byte(255)
	named := func(id byte, sub ...[]byte) []byte {
		return insert(evict, end, custom("name", []byte{id}, uleb(uint64(len(bodyOf(sub...)))), bodyOf(sub...)))
	}
	for _, c := range []struct {
		name   string
		module []byte
		loads  bool
	}{
		{"function names", named(1, uleb(claim)), true},
		{"functions with local names", named(2, uleb(claim)), true},
		{"local names", named(2, uleb(1), uleb(0), uleb(claim)), true},
		{"a function's name", named(1, uleb(1), uleb(0), uleb(claim)), true},
		{"the module's name", named(0, uleb(claim)), true},
		{"a name subsection", insert(evict, end, custom("name", []byte{9}, uleb(1<<32-1))), true},
		{"a custom section's name", insert(evict, end, wasmSection(0, uleb(claim))), false},
		{"types", insert(evict, 1, wasmSection(1, uleb(claim))), false},
		{"parameters", insert(evict, 1, wasmSection(1, bodyOf(uleb(1), []byte{0x60}, uleb(claim)))), false},
		{"results", insert(evict, 1, wasmSection(1, bodyOf(uleb(1), []byte{0x60, 0}, uleb(claim)))), false},
		{"imports", insert(evict, 2, wasmSection(2, uleb(claim))), false},
		{"an import's name", insert(evict, 2, wasmSection(2, bodyOf(uleb(1), uleb(claim)))), false},
		{"functions", insert(evict, 3, wasmSection(3, uleb(claim))), false},
		{"tables", insert(evict, 4, wasmSection(4, uleb(claim))), false},
		{"memories", insert(evict, 5, wasmSection(5, uleb(claim))), false},
		{"globals", insert(evict, 6, wasmSection(6, uleb(claim))), false},
		{"exports", insert(evict, 7, wasmSection(7, uleb(claim))), false},
		{"elements", insert(evict, 9, wasmSection(9, uleb(claim))), false},
		{"an element's functions", insert(evict, 9, wasmSection(9, bodyOf(uleb(1), []byte{1, 0}, uleb(claim)))), false},
		{"an element's expressions", insert(evict, 9, wasmSection(9, bodyOf(uleb(1), []byte{5, 0x70}, uleb(claim)))), false},
		{"bodies", insert(evict, 10, wasmSection(10, uleb(claim))), false},
		{"a body", insert(evict, 10, wasmSection(10, bodyOf(uleb(1), uleb(claim)))), false},
		{"data", insert(evict, 11, wasmSection(11, uleb(claim))), false},
		{"a data segment", insert(evict, 11, wasmSection(11, bodyOf(uleb(1), []byte{1}, uleb(claim)))), false},
		{"a section", bodyOf(evict, []byte{0}, uleb(claim)), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			m, err := openBytes(t, c.module, Options{Cache: &sandbox.Cache{}})
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > 2<<20 {
				t.Errorf("a module of %d bytes took %d bytes of memory", len(c.module), n)
			}
			if (err == nil) != c.loads || err != nil && !errors.Is(err, ErrBadModule) {
				t.Errorf("opening the module: got %v, %v, want it to load: %t", m, err, c.loads)
			}
		})
	}
}

// A module's names are shown to people, also in `kvhost policy inspect`, which lists its sections.
func TestNamesOfSectionsAreFitForPeople(t *testing.T) {
	name := "\x1b]0;owned\a\r\n\x00\u202e" + strings.Repeat("z", 900)
	s, err := sandbox.ScanModule(insert(minimal(abi.RoleEvict).bytes(), 255, custom(name)))
	if err != nil {
		t.Fatal(err)
	}
	for _, section := range s.Sections() {
		if n := section.Name; len(n) > 4096 || strings.ContainsFunc(n, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("the name of a section has %d bytes: %.300q", len(n), n)
		}
	}
}
