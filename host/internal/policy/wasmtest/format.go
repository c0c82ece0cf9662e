package wasmtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// claims are modules with counts and lengths that exceed their bytes. Decoders reserve memory for them.
func claims(b *builder) {
	a := minimal(abi.RoleEvict)
	named := func(id byte, sub ...[]byte) Assembly {
		return a.Ending(Custom("name", []byte{id}, Uleb(uint64(len(Join(sub...)))), Join(sub...)))
	}
	for _, claim := range []uint64{1 << 12, 1 << 22, 1<<32 - 1} {
		n := Uleb(claim)
		for name, c := range map[string]Assembly{
			"function names": named(1, n), "functions with local names": named(2, n), "local names": named(2, Uleb(1), Uleb(0), n),
			"a function's name": named(1, Uleb(1), Uleb(0), n), "the module's name": named(0, n),
			"a name subsection": a.Ending(Custom("name", []byte{9}, n)), "a custom name": a.Ending(Section(0, n)),
			"types": a.Replacing(1, n), "parameters": a.Replacing(1, Uleb(1), []byte{0x60}, n),
			"results": a.Replacing(1, Uleb(1), []byte{0x60, 0}, n), "imports": a.Replacing(2, n),
			"an import's module": a.Replacing(2, Uleb(1), n), "an import's name": a.Replacing(2, Uleb(1), Text("x"), n),
			"functions": a.Replacing(3, n), "tables": a.Replacing(4, n), "a table's elements": a.Replacing(4, Uleb(1), []byte{0x70, 0}, n),
			"memories": a.Replacing(5, n), "pages": a.Replacing(5, Uleb(1), []byte{0}, n), "globals": a.Replacing(6, n),
			"exports": a.Replacing(7, n), "an export's name": a.Replacing(7, Uleb(1), n), "elements": a.Replacing(9, n),
			"an element's functions":   a.Replacing(9, Uleb(1), []byte{1, 0}, n),
			"an element's expressions": a.Replacing(9, Uleb(1), []byte{5, 0x70}, n), "data count": a.Replacing(12, n),
			"bodies": a.Replacing(10, n), "a body": a.Replacing(10, Uleb(1), n), "locals": a.Replacing(10, Uleb(1), Uleb(8), n),
			"a local's repetition": a.Replacing(10, Uleb(1), Uleb(9), Uleb(1), n, []byte{0x7f, 0x0b}),
			"data":                 a.Replacing(11, n), "a data segment": a.Replacing(11, Uleb(1), []byte{1}, n),
		} {
			b.addf(abi.RoleEvict, c, "%s: %d", name, claim)
		}
		b.add(fmt.Sprintf("a section: %d", claim), abi.RoleEvict, Join(a.Bytes(), []byte{0}, n))
	}
	many := func(n int, item ...byte) []byte { return append(Uleb(uint64(n)), bytes.Repeat(item, n)...) }
	for name, c := range map[string]Assembly{
		"data segments": a.Replacing(11, many(1<<20, 1, 0)), "element segments": a.Replacing(9, many(1<<20, 1, 0, 0)),
		"elements": a.Replacing(9, []byte{1, 1, 0}, many(4<<20, 0)), "custom sections": a.Ending(bytes.Repeat([]byte{0, 1, 'x'}, 1<<20)),
		"imports": a.Replacing(2, many(1<<20, 0, 0, 0, 0)), "types": a.Replacing(1, many(1<<20, 0x60, 0, 0)),
		"types of many parameters": a.Replacing(1, many(1<<10, Join([]byte{0x60}, many(1<<12, 0x7f), []byte{0})...)),
	} {
		b.addf(abi.RoleEvict, c, "really so many %s", name)
	}
}

// evil is text that a terminal, a log or a parser may act on.
const evil = "\x1b]0;owned\a\x1b[2J\r\n\x00\u202e\"}{"

// names are modules with names that are not fit to be shown.
func names(b *builder) {
	a := minimal(abi.RoleEvict).with(abi.ExportStep, unreachable) // so that its stack is shown
	list := func(each func(i int) (index uint64, name string)) []byte {
		body := Uleb(uint64(len(a.Funcs)))
		for i := range a.Funcs {
			index, name := each(i)
			body = Join(body, Uleb(index), Text(name))
		}
		return Custom("name", []byte{1}, Uleb(uint64(len(body))), body)
	}
	for name, c := range map[string]Assembly{
		"control bytes":    a.Ending(list(func(i int) (uint64, string) { return uint64(i), evil })),
		"no UTF-8":         a.Ending(list(func(i int) (uint64, string) { return uint64(i), "\xff\xfe\x80" })),
		"megabytes":        a.Ending(list(func(i int) (uint64, string) { return uint64(i), strings.Repeat("n", 1<<20) })),
		"out of order":     a.Ending(list(func(i int) (uint64, string) { return uint64(99 - i), "n" })),
		"twice":            a.Ending(list(func(int) (uint64, string) { return 0, "n" })),
		"of no function":   a.Ending(list(func(i int) (uint64, string) { return 1<<32 - 10 + uint64(i), "n" })),
		"two sections":     a.Ending(Custom("name"), Custom("name")),
		"of a section":     a.Ending(Custom(evil)),
		"of an import":     a.Importing(evil, evil, ">"),
		"of a long import": a.Importing(strings.Repeat("m", 1000), strings.Repeat("n", 1000), ">"),
		"of a program":     a.with(evil, nil),
		"of another ABI":   Assembly{Pages: 1, Funcs: []Function{{Name: "kvhost_abi_" + evil, Sig: ">"}}},
		"debug sections":   a.Ending(Custom(".debug_info", bytes.Repeat([]byte{0xff}, 1<<16)), Custom(".debug_line", make([]byte, 1<<16))),
		"many exports": func() Assembly {
			c := a
			for i := range 990 {
				c.Funcs = append(c.Funcs[:len(c.Funcs):len(c.Funcs)], Function{Name: fmt.Sprintf("%s%d", strings.Repeat("e", 500), i), Sig: ">", Body: I32(1)})
			}
			return c
		}(),
	} {
		b.addf(abi.RoleEvict, c, "%s", name)
	}
}

// malformed are binaries that are cut off, shuffled or damaged.
func malformed(b *builder) {
	a := minimal(abi.RoleEvict).described(`,"memory_pages":64`, abi.RoleEvict).Importing(abi.ImportModule, abi.ImportFail, "ii>")
	whole := a.Bytes()
	for cut := 0; cut < len(whole); cut += max(1, len(whole)/40) {
		b.add(fmt.Sprintf("cut off at %d", cut), abi.RoleEvict, whole[:cut])
	}
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range 60 {
		damaged := bytes.Clone(whole)
		for range 1 + rng.IntN(3) {
			damaged[8+rng.IntN(len(damaged)-8)] = byte(rng.Uint32())
		}
		b.add(fmt.Sprintf("damaged %d", i), abi.RoleEvict, damaged)
	}
	for id := range byte(16) {
		b.add(fmt.Sprintf("section %d at the end", id), abi.RoleEvict, Join(whole, Section(id, []byte{0})))
		b.add(fmt.Sprintf("section %d first", id), abi.RoleEvict, Join(whole[:8], Section(id, []byte{0}), whole[8:]))
	}
	for name, tail := range map[string][]byte{
		"an overlong length": {0, 0x80, 0x80, 0x80, 0x80, 0x80, 0}, "a length of 33 bits": {0, 0xff, 0xff, 0xff, 0xff, 0x1f},
		"half a section": {0, 5, 1}, "zeros": make([]byte, 4096),
	} {
		b.add("ends with "+name, abi.RoleEvict, Join(whole, tail))
	}
	b.add("no bytes", abi.RoleEvict, nil)
	b.add("a component", abi.RoleEvict, []byte("\x00asm\x0d\x00\x01\x00"))
	b.add("too large", abi.RoleEvict, append(bytes.Clone(whole), Section(0, make([]byte, 17<<20))...))
}
