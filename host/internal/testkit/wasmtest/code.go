package wasmtest

import (
	"bytes"
	"slices"

	"github.com/kvhost/kvhost/abi"
)

// bombs are small modules that cost a compiler much.
func bombs(b *builder) {
	base := minimal(abi.RoleEvict)
	step := func(locals []byte, code ...[]byte) Assembly {
		a := base.with(abi.ExportStep, Join(code...), Packed(0, 0))
		i := slices.IndexFunc(a.Funcs, func(f Function) bool { return f.Name == abi.ExportStep })
		a.Funcs[i].Locals = locals
		return a
	}
	many := func(n int, f Function) Assembly {
		a := base
		a.Funcs = append(slices.Clone(a.Funcs), slices.Repeat([]Function{f}, n)...)
		return a
	}
	nest := func(n int, open ...byte) []byte { return Join(bytes.Repeat(open, n), bytes.Repeat([]byte{0x0b}, n)) }
	vectors := Join(Uleb(1), Uleb(9_000), []byte{0x7b})
	for name, a := range map[string]Assembly{
		"functions with many locals":      many(2_000, Function{Sig: ">", Locals: vectors}),
		"functions that use their locals": many(200, Function{Sig: ">", Locals: Join(Uleb(1), Uleb(9_000), []byte{0x7e}), Body: bytes.Repeat(Join(local(0), []byte{0x21, 1}), 2_000)}),
		"nested blocks":                   step(nil, nest(100_000, 0x02, 0x40)),
		"nested loops":                    step(nil, nest(20_000, 0x03, 0x40)),
		"nested ifs":                      step(nil, bytes.Repeat([]byte{0x41, 0, 0x04, 0x40}, 20_000), bytes.Repeat([]byte{0x0b}, 20_000)),
		"loops that carry all locals":     step(Join(Uleb(1), Uleb(5_000), []byte{0x7f}), nest(500, 0x03, 0x40)),
		"a straight line":                 step(nil, bytes.Repeat(Join(I32(1), drop), 300_000)),
		"a wide branch table":             step(nil, []byte{0x02, 0x40, 0x41, 0, 0x0e}, Uleb(100_000), make([]byte, 100_001), []byte{0x0b}),
		"unreachable code":                step(nil, unreachable, bytes.Repeat(Join(I32(1), drop), 200_000)),
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

// runaways are calls that do not end, or take longer than they should, in every place where a guest is called.
func runaways(b *builder) {
	bodies := func(self uint64) map[string][]byte {
		again := Join(I32(0), I32(0), Call(self), drop)
		return map[string][]byte{
			"an endless loop":             Loop(),
			"a loop of work":              Loop(store32(64, I32(1))),
			"loads that miss the caches":  Loop(store32(64, Join(load32(64), I32(4_099*64), []byte{opAdd}, I32(0x3fffc0), []byte{opAnd})), load32(64), []byte{0x28, 2, 0}, drop),
			"a long line in a loop":       Loop(bytes.Repeat(Join(I32(1), drop), 100_000)),
			"references in a line":        bytes.Repeat(Join([]byte{0xd2}, Uleb(self), drop), 20_000),
			"recursion":                   again,
			"exponential recursion":       Join(again, again),
			"growing by nothing":          Loop(I32(0), []byte{0x40, 0}, drop),
			"filling all memory":          Loop(I32(0), I32(7), I32(basePages<<16), []byte{0xfc, 11, 0}),
			"copying all memory":          Loop(I32(0), I32(8), I32(basePages<<16-8), []byte{0xfc, 10, 0, 0}),
			"endless lines":               Loop(I32(3), I32(64), I32(1024), Call(0)),
			"endless lines, in a row":     bytes.Repeat(Join(I32(3), I32(64), I32(1024), Call(0)), 20_000),
			"endless output":              Loop(store32(1024, I32(0)), store32(1028, I32(1<<20)), I32(2), I32(1024), I32(1), I32(64), Call(1), drop),
			"endless random bytes":        Loop(I32(0), I32(1<<20), Call(2), drop),
			"endless descriptions":        Loop(I32(64), I32(1024), Call(3)),
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
			a := minimal(at.role).Importing(abi.ImportModule, abi.ImportLog, "iii>").Importing(abi.ImportWASI, "fd_write", "iiii>i").
				Importing(abi.ImportWASI, "random_get", "ii>i").Importing(abi.ImportModule, abi.ImportFail, "ii>").
				described(`,"grants":["wasi-stub"]`, at.role)
			self := uint64(len(a.Imports) + slices.IndexFunc(a.Funcs, func(f Function) bool { return f.Name == at.export }))
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
		b.addf(role, a.with(export, Loop(), ok(export)), "an endless loop in %s", export)
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
func keeper() Assembly {
	return minimal(abi.RoleEvict).with(abi.ExportSave, Packed(0, 4)).with(abi.ExportLoad, I32(0)).
		described(`,"state_format":"hostile/1"`, abi.RoleEvict)
}

// memory are modules that take all that they can get.
func memory(b *builder) {
	greedy := `,"memory_pages":65536`
	base := minimal(abi.RoleEvict).described(greedy, abi.RoleEvict)
	table := base.Replacing(4, []byte{1, 0x70, 0, 0})
	huge := base
	huge.Pages = 4096
	for name, a := range map[string]Assembly{
		"growing at its start":        base.with(abi.ExportInit, loopUntilRefused(), I32(0)),
		"growing in each call":        base.with(abi.ExportStep, bytes.Repeat(Join(growOne, drop), 64), Packed(0, 0)),
		"growing for ever":            base.with(abi.ExportStep, Loop(growOne, drop), Packed(0, 0)),
		"growing by all at once":      base.with(abi.ExportInit, I32(65_000), []byte{0x40, 0}, drop, I32(0)),
		"growing beyond a size":       base.with(abi.ExportInit, I32(-1), []byte{0x40, 0}, drop, I32(0)),
		"touching all that it gets":   base.with(abi.ExportInit, loopUntilRefused(), I32(0), I32(1), I32(60<<20), []byte{0xfc, 11, 0}, I32(0)),
		"growing a table":             table.with(abi.ExportInit, []byte{0xd0, 0x70}, I32(1<<30), []byte{0xfc, 15, 0}, drop, I32(0)),
		"growing a table for ever":    table.with(abi.ExportStep, Loop([]byte{0xd0, 0x70}, I32(1000), []byte{0xfc, 15, 0}, drop), Packed(0, 0)),
		"trapping for want of memory": base.with(abi.ExportInit, loopUntilRefused(), unreachable),
		"starting with much":          huge,
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

func loopUntilRefused() []byte {
	return Join([]byte{0x03, 0x40}, growOne, I32(-1), []byte{0x47, 0x0d, 0, 0x0b})
}
