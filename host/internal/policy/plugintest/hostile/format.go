package hostile

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
	named := func(id byte, sub ...[]byte) assembly {
		return a.ending(custom("name", []byte{id}, uleb(uint64(len(join(sub...)))), join(sub...)))
	}
	for _, claim := range []uint64{1 << 12, 1 << 22, 1<<32 - 1} {
		n := uleb(claim)
		for name, c := range map[string]assembly{
			"function names": named(1, n), "functions with local names": named(2, n), "local names": named(2, uleb(1), uleb(0), n),
			"a function's name": named(1, uleb(1), uleb(0), n), "the module's name": named(0, n),
			"a name subsection": a.ending(custom("name", []byte{9}, n)), "a custom name": a.ending(section(0, n)),
			"types": a.replacing(1, n), "parameters": a.replacing(1, uleb(1), []byte{0x60}, n),
			"results": a.replacing(1, uleb(1), []byte{0x60, 0}, n), "imports": a.replacing(2, n),
			"an import's module": a.replacing(2, uleb(1), n), "an import's name": a.replacing(2, uleb(1), text("x"), n),
			"functions": a.replacing(3, n), "tables": a.replacing(4, n), "a table's elements": a.replacing(4, uleb(1), []byte{0x70, 0}, n),
			"memories": a.replacing(5, n), "pages": a.replacing(5, uleb(1), []byte{0}, n), "globals": a.replacing(6, n),
			"exports": a.replacing(7, n), "an export's name": a.replacing(7, uleb(1), n), "elements": a.replacing(9, n),
			"an element's functions":   a.replacing(9, uleb(1), []byte{1, 0}, n),
			"an element's expressions": a.replacing(9, uleb(1), []byte{5, 0x70}, n), "data count": a.replacing(12, n),
			"bodies": a.replacing(10, n), "a body": a.replacing(10, uleb(1), n), "locals": a.replacing(10, uleb(1), uleb(8), n),
			"a local's repetition": a.replacing(10, uleb(1), uleb(9), uleb(1), n, []byte{0x7f, 0x0b}),
			"data":                 a.replacing(11, n), "a data segment": a.replacing(11, uleb(1), []byte{1}, n),
		} {
			b.addf(abi.RoleEvict, c, "%s: %d", name, claim)
		}
		b.add(fmt.Sprintf("a section: %d", claim), abi.RoleEvict, join(a.bytes(), []byte{0}, n))
	}
	many := func(n int, item ...byte) []byte { return append(uleb(uint64(n)), bytes.Repeat(item, n)...) }
	for name, c := range map[string]assembly{
		"data segments": a.replacing(11, many(1<<20, 1, 0)), "element segments": a.replacing(9, many(1<<20, 1, 0, 0)),
		"elements": a.replacing(9, []byte{1, 1, 0}, many(4<<20, 0)), "custom sections": a.ending(bytes.Repeat([]byte{0, 1, 'x'}, 1<<20)),
		"imports": a.replacing(2, many(1<<20, 0, 0, 0, 0)), "types": a.replacing(1, many(1<<20, 0x60, 0, 0)),
		"types of many parameters": a.replacing(1, many(1<<10, join([]byte{0x60}, many(1<<12, 0x7f), []byte{0})...)),
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
		body := uleb(uint64(len(a.funcs)))
		for i := range a.funcs {
			index, name := each(i)
			body = join(body, uleb(index), text(name))
		}
		return custom("name", []byte{1}, uleb(uint64(len(body))), body)
	}
	for name, c := range map[string]assembly{
		"control bytes":    a.ending(list(func(i int) (uint64, string) { return uint64(i), evil })),
		"no UTF-8":         a.ending(list(func(i int) (uint64, string) { return uint64(i), "\xff\xfe\x80" })),
		"megabytes":        a.ending(list(func(i int) (uint64, string) { return uint64(i), strings.Repeat("n", 1<<20) })),
		"out of order":     a.ending(list(func(i int) (uint64, string) { return uint64(99 - i), "n" })),
		"twice":            a.ending(list(func(int) (uint64, string) { return 0, "n" })),
		"of no function":   a.ending(list(func(i int) (uint64, string) { return 1<<32 - 10 + uint64(i), "n" })),
		"two sections":     a.ending(custom("name"), custom("name")),
		"of a section":     a.ending(custom(evil)),
		"of an import":     a.importing(evil, evil, ">"),
		"of a long import": a.importing(strings.Repeat("m", 1000), strings.Repeat("n", 1000), ">"),
		"of a program":     a.with(evil, nil),
		"of another ABI":   assembly{pages: 1, funcs: []function{{name: "kvhost_abi_" + evil, sig: ">"}}},
		"debug sections":   a.ending(custom(".debug_info", bytes.Repeat([]byte{0xff}, 1<<16)), custom(".debug_line", make([]byte, 1<<16))),
		"many exports": func() assembly {
			c := a
			for i := range 990 {
				c.funcs = append(c.funcs[:len(c.funcs):len(c.funcs)], function{name: fmt.Sprintf("%s%d", strings.Repeat("e", 500), i), sig: ">", body: i32(1)})
			}
			return c
		}(),
	} {
		b.addf(abi.RoleEvict, c, "%s", name)
	}
}

// malformed are binaries that are cut off, shuffled or damaged.
func malformed(b *builder) {
	a := minimal(abi.RoleEvict).described(`,"memory_pages":64`, abi.RoleEvict).importing(abi.ImportModule, abi.ImportFail, "ii>")
	whole := a.bytes()
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
		b.add(fmt.Sprintf("section %d at the end", id), abi.RoleEvict, join(whole, section(id, []byte{0})))
		b.add(fmt.Sprintf("section %d first", id), abi.RoleEvict, join(whole[:8], section(id, []byte{0}), whole[8:]))
	}
	for name, tail := range map[string][]byte{
		"an overlong length": {0, 0x80, 0x80, 0x80, 0x80, 0x80, 0}, "a length of 33 bits": {0, 0xff, 0xff, 0xff, 0xff, 0x1f},
		"half a section": {0, 5, 1}, "zeros": make([]byte, 4096),
	} {
		b.add("ends with "+name, abi.RoleEvict, join(whole, tail))
	}
	b.add("no bytes", abi.RoleEvict, nil)
	b.add("a component", abi.RoleEvict, []byte("\x00asm\x0d\x00\x01\x00"))
	b.add("too large", abi.RoleEvict, append(bytes.Clone(whole), section(0, make([]byte, 17<<20))...))
}
