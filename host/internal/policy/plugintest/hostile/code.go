package hostile

import (
	"bytes"
	"slices"

	"github.com/kvhost/kvhost/abi"
)

// bombs are small modules that cost a compiler much.
func bombs(b *builder) {
	base := minimal(abi.RoleEvict)
	step := func(locals []byte, code ...[]byte) assembly {
		a := base.with(abi.ExportStep, join(code...), packed(0, 0))
		i := slices.IndexFunc(a.funcs, func(f function) bool { return f.name == abi.ExportStep })
		a.funcs[i].locals = locals
		return a
	}
	many := func(n int, f function) assembly {
		a := base
		a.funcs = append(slices.Clone(a.funcs), slices.Repeat([]function{f}, n)...)
		return a
	}
	nest := func(n int, open ...byte) []byte { return join(bytes.Repeat(open, n), bytes.Repeat([]byte{0x0b}, n)) }
	vectors := join(uleb(1), uleb(9_000), []byte{0x7b})
	for name, a := range map[string]assembly{
		"functions with many locals":      many(2_000, function{sig: ">", locals: vectors}),
		"functions that use their locals": many(200, function{sig: ">", locals: join(uleb(1), uleb(9_000), []byte{0x7e}), body: bytes.Repeat(join(local(0), []byte{0x21, 1}), 2_000)}),
		"nested blocks":                   step(nil, nest(100_000, 0x02, 0x40)),
		"nested loops":                    step(nil, nest(20_000, 0x03, 0x40)),
		"nested ifs":                      step(nil, bytes.Repeat([]byte{0x41, 0, 0x04, 0x40}, 20_000), bytes.Repeat([]byte{0x0b}, 20_000)),
		"loops that carry all locals":     step(join(uleb(1), uleb(5_000), []byte{0x7f}), nest(500, 0x03, 0x40)),
		"a straight line":                 step(nil, bytes.Repeat(join(i32(1), drop), 300_000)),
		"a wide branch table":             step(nil, []byte{0x02, 0x40, 0x41, 0, 0x0e}, uleb(100_000), make([]byte, 100_001), []byte{0x0b}),
		"unreachable code":                step(nil, unreachable, bytes.Repeat(join(i32(1), drop), 200_000)),
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

// runaways are calls that do not end, or take longer than they should, in every place where a guest is called.
func runaways(b *builder) {
	bodies := func(self uint64) map[string][]byte {
		again := join(i32(0), i32(0), call(self), drop)
		return map[string][]byte{
			"an endless loop":             loop(),
			"a loop of work":              loop(store32(64, i32(1))),
			"loads that miss the caches":  loop(store32(64, join(load32(64), i32(4_099*64), []byte{opAdd}, i32(0x3fffc0), []byte{opAnd})), load32(64), []byte{0x28, 2, 0}, drop),
			"a long line in a loop":       loop(bytes.Repeat(join(i32(1), drop), 100_000)),
			"references in a line":        bytes.Repeat(join([]byte{0xd2}, uleb(self), drop), 20_000),
			"recursion":                   again,
			"exponential recursion":       join(again, again),
			"growing by nothing":          loop(i32(0), []byte{0x40, 0}, drop),
			"filling all memory":          loop(i32(0), i32(7), i32(basePages<<16), []byte{0xfc, 11, 0}),
			"copying all memory":          loop(i32(0), i32(8), i32(basePages<<16-8), []byte{0xfc, 10, 0, 0}),
			"endless lines":               loop(i32(3), i32(64), i32(1024), call(0)),
			"endless lines, in a row":     bytes.Repeat(join(i32(3), i32(64), i32(1024), call(0)), 20_000),
			"endless output":              loop(store32(1024, i32(0)), store32(1028, i32(1<<20)), i32(2), i32(1024), i32(1), i32(64), call(1), drop),
			"endless random bytes":        loop(i32(0), i32(1<<20), call(2), drop),
			"endless descriptions":        loop(i32(64), i32(1024), call(3)),
			"loops that call one another": {0x03, 0x40, 0x02, 0x40, 0x02, 0x40, 0x41, 0, 0x0e, 1, 0, 1, 0x0b, 0x0c, 1, 0x0b, 0x0c, 0, 0x0b},
		}
	}
	for _, at := range []struct {
		role   abi.Role
		export string
	}{
		{abi.RoleEvict, abi.ExportStep}, {abi.RolePlace, abi.ExportPlace}, {abi.RoleEvict, abi.ExportInit},
	} {
		for name := range bodies(0) {
			a := minimal(at.role).importing(abi.ImportModule, abi.ImportLog, "iii>").importing(abi.ImportWASI, "fd_write", "iiii>i").
				importing(abi.ImportWASI, "random_get", "ii>i").importing(abi.ImportModule, abi.ImportFail, "ii>").
				described(`,"grants":["wasi-stub"]`, at.role)
			self := uint64(len(a.imports) + slices.IndexFunc(a.funcs, func(f function) bool { return f.name == at.export }))
			body := bodies(self)[name]
			if at.export == abi.ExportInit && (name == "recursion" || name == "exponential recursion" || name == "references in a line") {
				continue // these are calls of two parameters
			}
			b.addf(at.role, a.with(at.export, body, ok(at.export)), "%s in %s", name, at.export)
			if at.export != abi.ExportInit {
				b.addf(at.role, a.sleeping(at.export, false, body), "later %s in %s", name, at.export)
			}
		}
	}
	for _, export := range []string{abi.ExportInitialize, abi.ExportBuffer, abi.ExportEvents, abi.ExportNamespace, abi.ExportAdmit,
		abi.ExportLayout, abi.ExportSave, abi.ExportLoad} {
		role := roleOf(export)
		a := minimal(role)
		if export == abi.ExportSave || export == abi.ExportLoad {
			a = keeper()
		}
		b.addf(role, a.with(export, loop(), ok(export)), "an endless loop in %s", export)
	}
}

// roleOf is a role in which an export is called.
func roleOf(export string) abi.Role {
	switch export {
	case abi.ExportAdmit:
		return abi.RoleAdmit
	case abi.ExportPlace, abi.ExportNamespace:
		return abi.RolePlace
	case abi.ExportLayout:
		return abi.RoleLayout
	}
	return abi.RoleEvict
}

// keeper is an evict module with four bytes of state.
func keeper() assembly {
	return minimal(abi.RoleEvict).with(abi.ExportSave, packed(0, 4)).with(abi.ExportLoad, i32(0)).
		described(`,"state_format":"hostile/1"`, abi.RoleEvict)
}

// memory are modules that take all that they can get.
func memory(b *builder) {
	greedy := `,"memory_pages":65536`
	base := minimal(abi.RoleEvict).described(greedy, abi.RoleEvict)
	table := base.replacing(4, []byte{1, 0x70, 0, 0})
	huge := base
	huge.pages = 4096
	for name, a := range map[string]assembly{
		"growing at its start":        base.with(abi.ExportInit, loopUntilRefused(), i32(0)),
		"growing in each call":        base.with(abi.ExportStep, bytes.Repeat(join(growOne, drop), 64), packed(0, 0)),
		"growing for ever":            base.with(abi.ExportStep, loop(growOne, drop), packed(0, 0)),
		"growing by all at once":      base.with(abi.ExportInit, i32(65_000), []byte{0x40, 0}, drop, i32(0)),
		"growing beyond a size":       base.with(abi.ExportInit, i32(-1), []byte{0x40, 0}, drop, i32(0)),
		"touching all that it gets":   base.with(abi.ExportInit, loopUntilRefused(), i32(0), i32(1), i32(60<<20), []byte{0xfc, 11, 0}, i32(0)),
		"growing a table":             table.with(abi.ExportInit, []byte{0xd0, 0x70}, i32(1<<30), []byte{0xfc, 15, 0}, drop, i32(0)),
		"growing a table for ever":    table.with(abi.ExportStep, loop([]byte{0xd0, 0x70}, i32(1000), []byte{0xfc, 15, 0}, drop), packed(0, 0)),
		"trapping for want of memory": base.with(abi.ExportInit, loopUntilRefused(), unreachable),
		"starting with much":          huge,
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

func loopUntilRefused() []byte {
	return join([]byte{0x03, 0x40}, growOne, i32(-1), []byte{0x47, 0x0d, 0, 0x0b})
}
