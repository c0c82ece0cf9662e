package wasmtest

import "github.com/kvhost/kvhost/abi"

// answers are victims, decisions and states that break the contract.
func answers(b *builder) {
	evict := minimal(abi.RoleEvict)
	for name, code := range map[string][]byte{
		"too many victims":       Packed(0, 1025),
		"far too many victims":   Packed(0, 1<<32-1),
		"a slot out of range":    Join(store32(resultAt, I32(-1)), Packed(0, 1)),
		"a slot twice":           Packed(0, 2),
		"slots that are free":    Join(store32(resultAt, I32(40)), Packed(0, 1)),
		"the same slot always":   Packed(0, 1),
		"a bad status":           Packed(-1, 0),
		"an unknown status":      Packed(-2_000_000_000, 0),
		"a status and a count":   Packed(1, 1000),
		"never anything":         Packed(0, 0),
		"records overwritten":    Join(I32(0), I32(255), I32(basePages<<16), []byte{0xfc, 11, 0}, Packed(0, 1)),
		"everything at random":   Join(counting(1024), drop, store32(resultAt, Join(load32(1024), I32(1103515245), []byte{0x6c}, I32(63), []byte{opAnd})), Packed(0, 1)),
		"faults now and then":    Join(when(Join(counting(1024), I32(5), []byte{opAnd}, I32(5), []byte{opEq}), unreachable), Packed(0, 1)),
		"pinned and evicted too": Join(store32(resultAt, load32(bufferBase+1<<bufferShift)), Packed(0, 1)),
	} {
		b.addf(abi.RoleEvict, evict.with(abi.ExportStep, code), "%s", name)
		b.addf(abi.RoleEvict, evict.sleeping(abi.ExportStep, true, code), "later %s", name)
	}
	for status := range int32(3) {
		b.addf(abi.RoleEvict, evict.with(abi.ExportEvents, I32(status-3)), "events answered %d", status-3)
	}
	admit := minimal(abi.RoleAdmit)
	for name, code := range map[string][]byte{
		"two for yes":        Join(store32(resultAt, I32(2)), local(0), []byte{0xad}),
		"too few answers":    Packed(0, 0),
		"too many answers":   Packed(0, 1<<31),
		"a bad status":       Packed(-3, 0),
		"nothing is let in":  Join(store32(resultAt, I32(0)), local(0), []byte{0xad}),
		"changes the record": Join(store32(argsAt, I32(-1)), local(0), []byte{0xad}),
	} {
		b.addf(abi.RoleAdmit, admit.with(abi.ExportAdmit, code), "admit: %s", name)
		b.addf(abi.RoleAdmit, admit.sleeping(abi.ExportAdmit, true, code), "later admit: %s", name)
	}
	for name, a := range map[string]Assembly{
		"state beyond the limit":    keeper().with(abi.ExportSave, Packed(0, 1<<30)),
		"state with a bad status":   keeper().with(abi.ExportSave, Packed(-1, 0)),
		"state that it cannot load": keeper().with(abi.ExportLoad, I32(-1)),
		"state that it leaves":      keeper().with(abi.ExportLoad, I32(1)),
		"state out of nowhere":      keeper().with(abi.ExportSave, Join(store32(stateAt, I32(-1)), local(0), []byte{0xad})),
		"state that grows":          keeper().with(abi.ExportSave, I32(100), []byte{0x40, 0}, drop, Packed(0, 4)),
	} {
		b.addf(abi.RoleEvict, a, "%s", name)
	}
}

// path is the code of kv_place that gives every query one path.
func path(parts ...[]byte) []byte { return Join(Join(parts...), Packed(0, 1)) }

// written is a path of fixed text: the answer to the first query, for guests that take one at a time.
func written(text string) []byte {
	code := Join(store32(resultAt, I32(-1)), store32(resultAt+4, I32(abi.PlaceAnswerSize)), store32(resultAt+8, I32(int32(len(text)))))
	for i := 0; i < len(text); i += 4 {
		var word uint32
		for k := range min(4, len(text)-i) {
			word |= uint32(text[i+k]) << (8 * k)
		}
		code = Join(code, store32(resultAt+abi.PlaceAnswerSize+int32(i), I32(int32(word))))
	}
	return code
}

// letter puts a letter that the code computes at the n-th byte of the path.
func letter(n int32, code []byte) []byte {
	return Join(I32(resultAt+abi.PlaceAnswerSize+n), Join(code, I32(15), []byte{opAnd}, I32('a'), []byte{opAdd}), []byte{0x3a, 0, 0})
}

// places are names that are no function of the piece, that two pieces have, that lead out of the root or through another
// piece, and policies that fail between two of them.
func places(b *builder) {
	one := minimal(abi.RolePlace).with(abi.ExportBuffer, when(Join(local(1), I32(16<<10-1000), []byte{opGeU}, local(0), I32(abi.BufferResult), []byte{opEq}, []byte{opAnd}), I32(0), []byte{0x0f}), bufferBody())
	keyed := func(text string, at int32) []byte { // two letters of the key
		return Join(written(text), letter(at, load32(argsAt+24)), letter(at+1, Join(load32(argsAt+24), I32(4), []byte{0x76})),
			letter(at+2, load32(argsAt+28)), letter(at+3, Join(load32(argsAt+28), I32(4), []byte{0x76})), letter(at+4, load32(argsAt+32)))
	}
	for name, code := range map[string][]byte{
		"one name for all":            path(written("everything")),
		"a name for each call":        path(written("call/xxxx"), letter(5, counting(1024)), letter(6, Join(load32(1024), I32(4), []byte{0x76}))),
		"a name for each instance":    path(keyed("instance/xxxxxyz", 9), letter(14, counting(1024))),
		"names that change later":     path(keyed("later/xxxxxy", 6), letter(11, Join(counting(1024), I32(150), []byte{opGeU}))),
		"names through other pieces":  path(keyed("dir/xxxxx", 4), when(Join(load32(argsAt+24), I32(1), []byte{opAnd}), written("dir"))),
		"directories of other pieces": path(written("dir/a/b/c"), store32(resultAt+8, Join(load32(argsAt+24), I32(3), []byte{opAnd}, I32(1), []byte{0x74}, I32(3), []byte{opAdd}))),
		"the parent's directory":      path(written("../out")),
		"a root":                      path(written("/etc/kvhost")),
		"the store's own files":       path(written(".kvhost/lock")),
		"a NUL":                       path(written("a\x00b")),
		"nothing":                     path(written("")),
		"a kilobyte and more":         path(written("a"), store32(resultAt+8, I32(1025))),
		"outside its buffer":          path(written("a"), store32(resultAt+4, I32(-8))),
		"a root that is not there":    path(written("a"), store32(resultAt, I32(63))),
		"faults at every piece":       unreachable,
		"faults now and then":         Join(when(Join(counting(1024), I32(31), []byte{opAnd}, I32(31), []byte{opEq}), unreachable), path(keyed("often/xxxxx", 6))),
		"faults for some keys":        Join(when(Join(load32(argsAt+24), I32(15), []byte{opAnd}, I32(3), []byte{opEq}), unreachable), path(keyed("some/xxxxx", 5))),
		"fails after a while":         Join(when(Join(counting(1024), I32(100), []byte{opGeU}), unreachable), path(keyed("while/xxxxx", 6))),
		"a status":                    Packed(-1, 0),
		"too many answers":            Packed(0, 1000),
		"leaves it to the host":       Packed(1, 0),
	} {
		b.addf(abi.RolePlace, one.with(abi.ExportPlace, code), "%s", name)
		b.addf(abi.RolePlace, one.sleeping(abi.ExportPlace, true, code), "later %s", name)
	}
	for n := range 3 {
		b.addf(abi.RolePlace, one.with(abi.ExportNamespace, when(Join(local(0), I32(int32(n)), []byte{opEq}), unreachable), I32(0)), "a trap at namespace %d", n)
	}
}

// buffers are modules with buffers outside their memory, over one another, or where the host must not write.
func buffers(b *builder) {
	for _, role := range []abi.Role{abi.RoleEvict, abi.RoleAdmit, abi.RolePlace, abi.RoleLayout} {
		for name, body := range map[string][]byte{
			"no buffer":              I32(0),
			"not aligned":            I32(bufferBase + 8),
			"at the end":             I32(basePages << 16),
			"across the end":         I32(basePages<<16 - 16),
			"beyond a size":          I32(-16),
			"all in one place":       I32(bufferBase),
			"moved with each call":   Join(counting(1024), I32(20), []byte{0x74}, I32(bufferBase), []byte{opAdd}),
			"overlapping by 16":      Join(local(0), I32(10), []byte{0x74}, I32(bufferBase), []byte{opAdd}),
			"after a trap elsewhere": Join(when(Join(local(0), I32(2), []byte{opEq}), unreachable), bufferBody()),
		} {
			b.addf(role, minimal(role).with(abi.ExportBuffer, body), "%s as %s", name, role)
		}
	}
}
