package policy

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

var (
	uleb, text, join = wasmtest.Uleb, wasmtest.Text, wasmtest.Join
	section, custom  = wasmtest.Section, wasmtest.Custom
)

// A decoder must not reserve memory for what a module only claims to have. Each of these claims much of something in
// a few bytes. Names are for people: a module whose names claim too much is loaded.
func TestClaimsReserveNothing(t *testing.T) {
	names := []string{"function names", "functions with local names", "local names", "a function's name", "the module's name",
		"a name subsection"}
	for _, claim := range []uint64{1 << 22, 1<<32 - 1} {
		for claimed, a := range claims(claim) {
			t.Run(fmt.Sprint(claim, " ", claimed), func(t *testing.T) {
				b := a.Bytes()
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				m, err := openBytes(t, b, Options{Cache: &sandbox.Cache{}})
				runtime.ReadMemStats(&after)
				if n := after.TotalAlloc - before.TotalAlloc; n > 2<<20 {
					t.Errorf("a module of %d bytes took %d bytes of memory, want at most %d", len(b), n, 2<<20)
				}
				if loads := slices.Contains(names, claimed); (err == nil) != loads || err != nil && !errors.Is(err, ErrBadModule) {
					t.Errorf("opening the module: got %v, %v, want it to load: %t", m, err, loads)
				}
			})
		}
	}
}

// Whatever a module's bytes and names are, it is opened or is a bad one, and what is said of it, or of its fault, is fit for people.
func TestOddModulesAreRefusedInWords(t *testing.T) {
	all := malformed()
	for _, list := range []map[string]wasmtest.Assembly{crowds(), named()} {
		for name, a := range list {
			all[name] = a.Bytes()
		}
	}
	opened := 0
	for name, b := range all {
		m, err := openBytes(t, b, Options{Cache: &sandbox.Cache{}})
		if err != nil && !errors.Is(err, ErrBadModule) && !errors.Is(err, ErrGrant) {
			t.Errorf("%s: got %v, want %v", name, err, ErrBadModule)
		}
		if err == nil {
			opened++
			_, err = enterEvict(m)
		}
		odd := func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }
		if text := fmt.Sprint(err); len(text) > 8192 || strings.ContainsFunc(text, odd) {
			t.Errorf("%s: %d bytes are said of it, want at most 8192 printable ones: %.300q", name, len(text), text)
		}
	}
	if opened < 10 || opened > len(all)/2 {
		t.Errorf("%d of %d odd modules were opened, want some of both", opened, len(all))
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

// claims are modules with counts and lengths that exceed their bytes.
func claims(claim uint64) map[string]wasmtest.Assembly {
	a := minimal(abi.RoleEvict)
	named := func(id byte, sub ...[]byte) wasmtest.Assembly {
		return a.Ending(custom("name", []byte{id}, uleb(uint64(len(join(sub...)))), join(sub...)))
	}
	n := uleb(claim)
	return map[string]wasmtest.Assembly{
		"function names": named(1, n), "functions with local names": named(2, n), "local names": named(2, uleb(1), uleb(0), n),
		"a function's name": named(1, uleb(1), uleb(0), n), "the module's name": named(0, n),
		"a name subsection": a.Ending(custom("name", []byte{9}, n)), "a custom name": a.Ending(section(0, n)),
		"types": a.Replacing(1, n), "parameters": a.Replacing(1, uleb(1), []byte{0x60}, n),
		"results": a.Replacing(1, uleb(1), []byte{0x60, 0}, n), "imports": a.Replacing(2, n),
		"an import's module": a.Replacing(2, uleb(1), n), "an import's name": a.Replacing(2, uleb(1), text("x"), n),
		"functions": a.Replacing(3, n), "tables": a.Replacing(4, n), "a table's elements": a.Replacing(4, uleb(1), []byte{0x70, 0}, n),
		"memories": a.Replacing(5, n), "pages": a.Replacing(5, uleb(1), []byte{0}, n), "globals": a.Replacing(6, n),
		"exports": a.Replacing(7, n), "an export's name": a.Replacing(7, uleb(1), n), "elements": a.Replacing(9, n),
		"an element's functions":   a.Replacing(9, uleb(1), []byte{1, 0}, n),
		"an element's expressions": a.Replacing(9, uleb(1), []byte{5, 0x70}, n), "data count": a.Replacing(12, n),
		"bodies": a.Replacing(10, n), "a body": a.Replacing(10, uleb(1), n), "locals": a.Replacing(10, uleb(1), uleb(8), n),
		"a local's repetition": a.Replacing(10, uleb(1), uleb(9), uleb(1), n, []byte{0x7f, 0x0b}),
		"data":                 a.Replacing(11, n), "a data segment": a.Replacing(11, uleb(1), []byte{1}, n),
	}
}

// crowds are modules with really so many of something.
func crowds() map[string]wasmtest.Assembly {
	a := minimal(abi.RoleEvict)
	many := func(n int, item ...byte) []byte { return append(uleb(uint64(n)), bytes.Repeat(item, n)...) }
	return map[string]wasmtest.Assembly{
		"data segments": a.Replacing(11, many(1<<20, 1, 0)), "element segments": a.Replacing(9, many(1<<20, 1, 0, 0)),
		"elements": a.Replacing(9, []byte{1, 1, 0}, many(4<<20, 0)), "custom sections": a.Ending(bytes.Repeat([]byte{0, 1, 'x'}, 1<<20)),
		"imports": a.Replacing(2, many(1<<20, 0, 0, 0, 0)), "types": a.Replacing(1, many(1<<20, 0x60, 0, 0)),
		"types of many parameters": a.Replacing(1, many(1<<10, join([]byte{0x60}, many(1<<12, 0x7f), []byte{0})...)),
	}
}

// evil is text that a terminal, a log or a parser may act on.
const evil = "\x1b]0;owned\a\x1b[2J\r\n\x00\u202e\"}{"

// named are modules with names that are not fit to be shown.
func named() map[string]wasmtest.Assembly {
	a := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", unreachable) // so that its stack is shown
	list := func(each func(i int) (index uint64, name string)) []byte {
		body := uleb(uint64(len(a.Funcs)))
		for i := range a.Funcs {
			index, name := each(i)
			body = join(body, uleb(index), text(name))
		}
		return custom("name", []byte{1}, uleb(uint64(len(body))), body)
	}
	return map[string]wasmtest.Assembly{
		"control bytes":    a.Ending(list(func(i int) (uint64, string) { return uint64(i), evil })),
		"no UTF-8":         a.Ending(list(func(i int) (uint64, string) { return uint64(i), "\xff\xfe\x80" })),
		"megabytes":        a.Ending(list(func(i int) (uint64, string) { return uint64(i), strings.Repeat("n", 1<<20) })),
		"out of order":     a.Ending(list(func(i int) (uint64, string) { return uint64(99 - i), "n" })),
		"twice":            a.Ending(list(func(int) (uint64, string) { return 0, "n" })),
		"of no function":   a.Ending(list(func(i int) (uint64, string) { return 1<<32 - 10 + uint64(i), "n" })),
		"two sections":     a.Ending(custom("name"), custom("name")),
		"of a section":     a.Ending(custom(evil)),
		"of an import":     a.Importing(evil, evil, ">"),
		"of a long import": a.Importing(strings.Repeat("m", 1000), strings.Repeat("n", 1000), ">"),
		"of a program":     a.With(evil, ">"),
		"of another ABI":   wasmtest.Assembly{Pages: 1, Funcs: []wasmtest.Function{{Name: "kvhost_abi_" + evil, Sig: ">"}}},
		"debug sections":   a.Ending(custom(".debug_info", bytes.Repeat([]byte{0xff}, 1<<16)), custom(".debug_line", make([]byte, 1<<16))),
		"many exports": func() wasmtest.Assembly {
			c := a
			for i := range 990 {
				name := fmt.Sprintf("%s%d", strings.Repeat("e", 500), i)
				c.Funcs = append(slices.Clip(c.Funcs), wasmtest.Function{Name: name, Sig: ">", Body: wasmtest.I32(1)})
			}
			return c
		}(),
	}
}

// malformed are binaries that are cut off, shuffled or damaged.
func malformed() map[string][]byte {
	a := minimal(abi.RoleEvict).Importing(abi.ImportModule, abi.ImportFail, "ii>")
	a.Manifest = `{"name":"hostile","version":"1","abi":1,"roles":["evict"],"memory_pages":64}`
	whole := a.Bytes()
	list := map[string][]byte{
		"no bytes": nil, "a component": []byte("\x00asm\x0d\x00\x01\x00"),
		"too large": append(bytes.Clone(whole), section(0, make([]byte, 17<<20))...),
	}
	for cut := 0; cut < len(whole); cut += max(1, len(whole)/40) {
		list[fmt.Sprintf("cut off at %d", cut)] = whole[:cut]
	}
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range 60 {
		damaged := bytes.Clone(whole)
		for range 1 + rng.IntN(3) {
			damaged[8+rng.IntN(len(damaged)-8)] = byte(rng.Uint32())
		}
		list[fmt.Sprintf("damaged %d", i)] = damaged
	}
	for id := range byte(16) {
		list[fmt.Sprintf("section %d at the end", id)] = join(whole, section(id, []byte{0}))
		list[fmt.Sprintf("section %d first", id)] = join(whole[:8], section(id, []byte{0}), whole[8:])
	}
	for name, tail := range map[string][]byte{
		"an overlong length": {0, 0x80, 0x80, 0x80, 0x80, 0x80, 0}, "a length of 33 bits": {0, 0xff, 0xff, 0xff, 0xff, 0x1f},
		"half a section": {0, 5, 1}, "zeros": make([]byte, 4096),
	} {
		list["ends with "+name] = join(whole, tail)
	}
	return list
}
