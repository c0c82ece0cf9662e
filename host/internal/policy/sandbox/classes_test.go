package sandbox

import (
	"bytes"

	"github.com/kvhost/kvhost/abi"
)

// setup is one instruction of a call that nobody waits for. It must not hold the host up and is measured by itself.
func setup(name string, g guest, op ...any) class {
	g.funcs[0].name, g.funcs[0].code = setupExport, code(op...)
	return class{name: name + ", in setup", guest: g}
}

func memoryClasses() []class {
	spread := code(next(vastBits-6), localGet, 0, i32(64), i32Mul) // an address in 256 MiB
	loop := func(name string, body ...any) class {
		return class{name: name, guest: events(vastPages, 2, forever(body...))}
	}
	small := func(name string, body ...any) class {
		return class{name: name, guest: events(1, 2, forever(body...))}
	}
	chase := loop("load, each waits for the last", localGet, 1, bytes.Repeat([]byte{0x28, 2, 0}, 64), localSet, 1)
	chase.prepare = true // a chain through all lines of 64 bytes
	line := code(localGet, 0, i32(64), i32Mul)
	lay := code(line, next(vastBits-6), line, i32Store, 2, 0, localGet, 0, 0x0d, 0)
	chase.guest.funcs = append(chase.guest.funcs, guestFunc{
		name: "prepare", locals: [][]byte{{1, i32Type}}, code: code(opLoop, 0x40, lay, opEnd),
	})
	page := code(localGet, 0, i32(4096), i32Add, i32(1<<vastBits-1), i32And, localTee, 0)
	across := code(next(vastBits-12), localGet, 0, i32(4096), i32Mul, 0xfd, 0, 0, 0xf8, 0x1f, opDrop)
	data := events(vastPages, 1, nil)
	const most = 8_000_000
	data.data = [][]byte{code(1, leb(most), make([]byte, most))}
	return []class{
		small("loop"),
		chase,
		loop("load, random", unrolled(spread, 0x28, 2, 0, opDrop)),
		loop("load v128 across pages", unrolled(across)),
		loop("store, random", unrolled(spread, localGet, 0, i32Store, 2, 0)),
		loop("first touch of each page", page, i32(1), i32Store, 2, 0),
		small("memory.size", unrolled(0x3f, 0, opDrop)),
		small("memory.grow 0", i32(0), 0x40, 0, opDrop),
		small("memory.grow 1", i32(1), 0x40, 0, opDrop),
		setup("memory.grow by 256 MiB", events(1, 1, nil), i32(4096), 0x40, 0, opDrop),
		small("memory.copy 0", unrolled(i32(0), i32(0), i32(0), 0xfc, 10, 0, 0)),
		loop("memory.copy 64 bytes, random", unrolled(spread, spread, i32(64), 0xfc, 10, 0, 0)),
		loop("memory.copy 64 MiB", i32(0), i32(128<<20), i32(64<<20), 0xfc, 10, 0, 0),
		loop("memory.fill 1 byte, random", unrolled(spread, i32(1), i32(1), 0xfc, 11, 0)),
		loop("memory.fill 128 MiB", i32(0), i32(1), i32(128<<20), 0xfc, 11, 0),
		setup("memory.init 8 MiB", data, i32(0), i32(0), i32(most), 0xfc, 8, 0, 0),
	}
}

func tableClasses() []class {
	const million = 1 << 20
	table := code(int(funcType), 0x01, leb(million), leb(million))
	growing := []byte{funcType, 0, 1}
	null := []byte{0xd0, 0x70}
	fill := []byte{0xfc, 17, 0}
	guestOf := func(tables ...[]byte) guest {
		g := events(1, 1, nil)
		g.tables = tables
		g.elements = [][]byte{code(1, 0, leb(1000), make([]byte, 1000))} // passive, of function 0
		g.data = [][]byte{{1, 1, 7}}
		return g
	}
	loop := func(name string, body ...any) class {
		g := guestOf(table)
		g.funcs[0].code = forever(body...)
		return class{name: name, guest: g}
	}
	get := loop("table.get, random",
		unrolled(next(20), localGet, 0, 0x25, 0, 0xd1, localGet, 0, i32Add, i32(million-1), i32And, localSet, 0))
	get.prepare = true
	get.guest.funcs = append(get.guest.funcs, guestFunc{name: "prepare", code: code(i32(0), 0xd2, 0, i32(million), fill)})
	growOne := class{name: "table.grow 1", guest: guestOf(growing)}
	growOne.guest.funcs[0].code = forever(null, i32(1), 0xfc, 15, 0, opDrop)
	return []class{
		loop("ref.func", unrolled(0xd2, 0, opDrop)),
		loop("ref.is_null", unrolled(null, 0xd1, opDrop)),
		get,
		loop("table.set, random", unrolled(next(20), localGet, 0, null, 0x26, 0)),
		loop("table.size", unrolled(0xfc, 16, 0, opDrop)),
		loop("table.grow 0", null, i32(0), 0xfc, 15, 0, opDrop),
		growOne,
		setup("table.grow a million", guestOf(growing), null, i32(million-1), 0xfc, 15, 0, opDrop),
		loop("table.fill 1", unrolled(i32(5), null, i32(1), fill)),
		setup("table.fill a million", guestOf(table), i32(0), null, i32(million), fill),
		setup("table.copy a million", guestOf(table), i32(0), i32(1), i32(million-1), 0xfc, 14, 0, 0),
		loop("table.init 1000", i32(0), i32(0), i32(1000), 0xfc, 12, 0, 0),
		loop("elem.drop, data.drop", unrolled(0xfc, 13, 0, 0xfc, 9, 0)),
	}
}

func callClasses() []class {
	loop := func(name string, body ...any) class {
		return class{name: name, guest: events(1, 3, forever(body...))}
	}
	const functions, targets = 16384, 8192
	indirect := loop("call_indirect, random", next(14), localGet, 0, 0x11, 0, 0)
	var all []byte
	for i := range functions {
		indirect.guest.funcs = append(indirect.guest.funcs, guestFunc{})
		all = append(all, leb(i+1)...)
	}
	indirect.guest.tables = [][]byte{code(int(funcType), 0, leb(functions))}
	indirect.guest.elements = [][]byte{code(0, i32(0), opEnd, leb(functions), all)}
	var labels, blocks []byte
	for i := range targets {
		labels = append(labels, leb(i)...)
		blocks = code(blocks, opEnd, i32(0), i32(i), i32Store, 2, 0, opBr, leb(targets-i-1))
	}
	open := bytes.Repeat([]byte{0x02, 0x40}, targets)
	jump := code(opLoop, 0x40, open, next(13), localGet, 0, 0x0e, leb(targets-1), labels, blocks, opEnd)
	direct := loop("call", unrolled(0x10, 1))
	direct.guest.funcs = append(direct.guest.funcs, guestFunc{})
	globals := loop("global.get, global.set", unrolled(0x23, 0, 0x24, 0))
	globals.guest.globals = [][]byte{{i32Type, 1, 0x41, 0, opEnd}}
	one := code(localGet, 1, i32(1), i32Add, localSet, 1)
	return []class{
		direct,
		indirect,
		{name: "br_table, random", guest: events(1, 1, jump)},
		globals,
		loop("select", unrolled(next(20), localGet, 0, localGet, 1, localGet, 0, i32(1), i32And, 0x1b, localSet, 1)),
		loop("if, at random", unrolled(next(31), localGet, 0, i32(1<<17), i32And, 0x04, 0x40, one, opEnd)),
		{name: "recursion, 1 local", guest: recursion(1, i32Type)},
		{name: "recursion, 60 i32", guest: recursion(60, i32Type)},
		{name: "recursion, 2000 v128", guest: recursion(2000, v128Type)},
		{name: "recursion, wide frame", guest: wideFrame(5000)},
	}
}

func hostClasses() []class {
	host := func(module, name string, args ...any) class {
		f := hostFunctions[module][name]
		results := bytes.Repeat([]byte{opDrop}, len(f.results))
		g := events(200, 0, forever(code(args...), 0x10, 0, results))
		g.imports, g.types = [][2]string{{module, name}}, [][]byte{functionType(f.params, f.results)}
		return class{name: "host: " + name, guest: g}
	}
	write := host(abi.ImportWASI, "fd_write", i32(1), i32(0), i32(1), i32(16))
	write.guest.data = [][]byte{code(0, i32(0), opEnd, 8, 0, 1, 0, 0, 0, 0, 1, 0)} // 64 KiB at 256
	return []class{
		host(abi.ImportModule, abi.ImportLogEnabled, i32(0)),
		host(abi.ImportModule, abi.ImportLog, i32(3), i32(0), i32(1024)),
		host(abi.ImportModule, abi.ImportFail, i32(0), i32(1024)),
		host(abi.ImportModule, abi.ImportNow),
		host(abi.ImportModule, abi.ImportCounterAdd, i32(0), 0x42, 1),
		host(abi.ImportModule, abi.ImportRand),
		host(abi.ImportWASI, "random_get", i32(0), i32(8<<20)),
		write,
		host(abi.ImportWASI, "clock_time_get", i32(0), 0x42, 0, i32(0)),
	}
}
