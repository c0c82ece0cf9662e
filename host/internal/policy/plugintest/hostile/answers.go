package hostile

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// answers are victims, decisions and states that break the contract.
func answers(b *builder) {
	evict := minimal(abi.RoleEvict)
	for name, code := range map[string][]byte{
		"too many victims":       packed(0, 1025),
		"far too many victims":   packed(0, 1<<32-1),
		"a slot out of range":    join(store32(resultAt, i32(-1)), packed(0, 1)),
		"a slot twice":           packed(0, 2),
		"slots that are free":    join(store32(resultAt, i32(40)), packed(0, 1)),
		"the same slot always":   packed(0, 1),
		"a bad status":           packed(-1, 0),
		"an unknown status":      packed(-2_000_000_000, 0),
		"a status and a count":   packed(1, 1000),
		"never anything":         packed(0, 0),
		"records overwritten":    join(i32(0), i32(255), i32(basePages<<16), []byte{0xfc, 11, 0}, packed(0, 1)),
		"everything at random":   join(counting(1024), drop, store32(resultAt, join(load32(1024), i32(1103515245), []byte{0x6c}, i32(63), []byte{opAnd})), packed(0, 1)),
		"faults now and then":    join(when(join(counting(1024), i32(5), []byte{opAnd}, i32(5), []byte{opEq}), unreachable), packed(0, 1)),
		"pinned and evicted too": join(store32(resultAt, load32(bufferBase+1<<bufferShift)), packed(0, 1)),
	} {
		b.addf(abi.RoleEvict, evict.with(abi.ExportStep, code), "%s", name)
		b.addf(abi.RoleEvict, evict.sleeping(abi.ExportStep, true, code), "later %s", name)
	}
	for status := range int32(3) {
		b.addf(abi.RoleEvict, evict.with(abi.ExportEvents, i32(status-3)), "events answered %d", status-3)
	}
	admit := minimal(abi.RoleAdmit)
	for name, code := range map[string][]byte{
		"two for yes":        join(store32(resultAt, i32(2)), local(0), []byte{0xad}),
		"too few answers":    packed(0, 0),
		"too many answers":   packed(0, 1<<31),
		"a bad status":       packed(-3, 0),
		"nothing is let in":  join(store32(resultAt, i32(0)), local(0), []byte{0xad}),
		"changes the record": join(store32(argsAt, i32(-1)), local(0), []byte{0xad}),
	} {
		b.addf(abi.RoleAdmit, admit.with(abi.ExportAdmit, code), "admit: %s", name)
		b.addf(abi.RoleAdmit, admit.sleeping(abi.ExportAdmit, true, code), "later admit: %s", name)
	}
	for name, a := range map[string]assembly{
		"state beyond the limit":    keeper().with(abi.ExportSave, packed(0, 1<<30)),
		"state with a bad status":   keeper().with(abi.ExportSave, packed(-1, 0)),
		"state that it cannot load": keeper().with(abi.ExportLoad, i32(-1)),
		"state that it leaves":      keeper().with(abi.ExportLoad, i32(1)),
		"state out of nowhere":      keeper().with(abi.ExportSave, join(store32(stateAt, i32(-1)), local(0), []byte{0xad})),
		"state that grows":          keeper().with(abi.ExportSave, i32(100), []byte{0x40, 0}, drop, packed(0, 4)),
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

// path is the code of kv_place that gives every query one path.
func path(parts ...[]byte) []byte { return join(join(parts...), packed(0, 1)) }

// written is a path of fixed text: the answer to the first query, for guests that take one at a time.
func written(text string) []byte {
	code := join(store32(resultAt, i32(-1)), store32(resultAt+4, i32(abi.PlaceAnswerSize)), store32(resultAt+8, i32(int32(len(text)))))
	for i := 0; i < len(text); i += 4 {
		var word uint32
		for k := range min(4, len(text)-i) {
			word |= uint32(text[i+k]) << (8 * k)
		}
		code = join(code, store32(resultAt+abi.PlaceAnswerSize+int32(i), i32(int32(word))))
	}
	return code
}

// letter puts a letter that the code computes at the n-th byte of the path.
func letter(n int32, code []byte) []byte {
	return join(i32(resultAt+abi.PlaceAnswerSize+n), join(code, i32(15), []byte{opAnd}, i32('a'), []byte{opAdd}), []byte{0x3a, 0, 0})
}

// places are names that are no function of the piece, that two pieces have, that lead out of the root or through another
// piece, and policies that fail between two of them.
func places(b *builder) {
	one := minimal(abi.RolePlace).with(abi.ExportBuffer, when(join(local(1), i32(16<<10-1000), []byte{opGeU}, local(0), i32(abi.BufferResult), []byte{opEq}, []byte{opAnd}), i32(0), []byte{0x0f}), bufferBody())
	keyed := func(text string, at int32) []byte { // two letters of the key
		return join(written(text), letter(at, load32(argsAt+24)), letter(at+1, join(load32(argsAt+24), i32(4), []byte{0x76})),
			letter(at+2, load32(argsAt+28)), letter(at+3, join(load32(argsAt+28), i32(4), []byte{0x76})), letter(at+4, load32(argsAt+32)))
	}
	for name, code := range map[string][]byte{
		"one name for all":            path(written("everything")),
		"a name for each call":        path(written("call/xxxx"), letter(5, counting(1024)), letter(6, join(load32(1024), i32(4), []byte{0x76}))),
		"a name for each instance":    path(keyed("instance/xxxxxyz", 9), letter(14, counting(1024))),
		"names that change later":     path(keyed("later/xxxxxy", 6), letter(11, join(counting(1024), i32(150), []byte{opGeU}))),
		"names through other pieces":  path(keyed("dir/xxxxx", 4), when(join(load32(argsAt+24), i32(1), []byte{opAnd}), written("dir"))),
		"directories of other pieces": path(written("dir/a/b/c"), store32(resultAt+8, join(load32(argsAt+24), i32(3), []byte{opAnd}, i32(1), []byte{0x74}, i32(3), []byte{opAdd}))),
		"the parent's directory":      path(written("../out")),
		"a root":                      path(written("/etc/kvhost")),
		"the store's own files":       path(written(".kvhost/lock")),
		"a NUL":                       path(written("a\x00b")),
		"nothing":                     path(written("")),
		"a kilobyte and more":         path(written("a"), store32(resultAt+8, i32(1025))),
		"outside its buffer":          path(written("a"), store32(resultAt+4, i32(-8))),
		"a root that is not there":    path(written("a"), store32(resultAt, i32(63))),
		"faults at every piece":       unreachable,
		"faults now and then":         join(when(join(counting(1024), i32(31), []byte{opAnd}, i32(31), []byte{opEq}), unreachable), path(keyed("often/xxxxx", 6))),
		"faults for some keys":        join(when(join(load32(argsAt+24), i32(15), []byte{opAnd}, i32(3), []byte{opEq}), unreachable), path(keyed("some/xxxxx", 5))),
		"fails after a while":         join(when(join(counting(1024), i32(100), []byte{opGeU}), unreachable), path(keyed("while/xxxxx", 6))),
		"a status":                    packed(-1, 0),
		"too many answers":            packed(0, 1000),
		"leaves it to the host":       packed(1, 0),
	} {
		b.addf(abi.RolePlace, one.with(abi.ExportPlace, code), "%s", name)
		b.addf(abi.RolePlace, one.sleeping(abi.ExportPlace, true, code), "later %s", name)
	}
	for n := range 3 {
		b.addf(abi.RolePlace, one.with(abi.ExportNamespace, when(join(local(0), i32(int32(n)), []byte{opEq}), unreachable), i32(0)), "a trap at namespace %d", n)
	}
}

// layouts miss, repeat or stretch what is to be stored.
func layouts(b *builder) {
	base := minimal(abi.RoleLayout)
	segment := func(at int32, words ...int32) (code []byte) {
		for i, w := range words {
			code = join(code, store32(resultAt+24*at+4*int32(i), i32(w)))
		}
		return code
	}
	for name, code := range map[string][]byte{
		"no segments":           packed(0, 0),
		"too many segments":     packed(0, 65_537),
		"far too many":          packed(0, 1<<32-1),
		"an empty segment":      packed(0, 1),
		"a byte too many":       join(segment(0, 0, 0, 1, 0, -1, 0), packed(0, 1)),
		"a plane out of range":  join(segment(0, 99, 0, 1, 0, 1, 0), packed(0, 1)),
		"one byte twice":        join(segment(0, 0, 0, 1, 0, 8, 0), segment(1, 0, 0, 1, 0, 8, 0), packed(0, 2)),
		"gaps":                  join(segment(0, 0, 0, 1, 0, 8, 4095), packed(0, 1)),
		"gaps beyond all":       join(segment(0, 0, 0, 1, 0, 8, -1), packed(0, 1)),
		"an unknown status":     packed(-99, 0),
		"a trap":                unreachable,
		"another each time":     join(store32(resultAt+20, counting(1024)), packed(0, 1)),
		"what is in the buffer": join(i32(resultAt), i32(argsAt), i32(1<<16), []byte{0xfc, 10, 0, 0}, packed(0, 2000)),
	} {
		b.addf(abi.RoleLayout, base.with(abi.ExportLayout, code), "%s", name)
	}
}

// traps are faults of every kind in every export.
func traps(b *builder) {
	kinds := []struct {
		name string
		code []byte
	}{
		{"unreachable", unreachable},
		{"a division by zero", join(i32(1), i32(0), []byte{0x6d}, drop)},
		{"a load outside", join(load32(-4), drop)},
		{"a number that does not fit", []byte{0x43, 0, 0, 0xc0, 0x7f, 0xa8, 0x1a}}, // i32.trunc_f32_s of a NaN
		{"an exit", join(i32(3), call(0))},
	}
	for _, export := range []string{abi.ExportInitialize, abi.ExportBuffer, abi.ExportInit, abi.ExportNamespace, abi.ExportEvents,
		abi.ExportStep, abi.ExportAdmit, abi.ExportPlace, abi.ExportLayout, abi.ExportSave, abi.ExportLoad} {
		for _, kind := range kinds {
			role := roleOf(export)
			a := minimal(role)
			if export == abi.ExportSave || export == abi.ExportLoad {
				a = keeper()
			}
			a = a.importing(abi.ImportWASI, "proc_exit", "i>").with(export, kind.code, ok(export))
			fields := `,"grants":["wasi-stub"]`
			if export == abi.ExportSave || export == abi.ExportLoad {
				fields += `,"state_format":"hostile/1"`
			}
			b.add(fmt.Sprintf("%s in %s", kind.name, export), role, a.described(fields, role).bytes())
			if export == abi.ExportStep || export == abi.ExportEvents || export == abi.ExportPlace || export == abi.ExportAdmit {
				b.add(fmt.Sprintf("later %s in %s", kind.name, export), role, a.sleeping(export, false, kind.code).described(fields, role).bytes())
			}
		}
	}
}
