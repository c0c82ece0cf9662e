package sandbox

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
)

// class is a kind of instruction, with a guest whose kv_events does nothing else for ever, in the way that takes
// longest.
type class struct {
	name    string
	guest   guest
	prepare bool // the guest has a function "prepare"
}

const (
	opLoop, opEnd, opBr, opDrop      = 0x03, 0x0b, 0x0c, 0x1a
	localGet, localSet, localTee     = 0x20, 0x21, 0x22
	i32Add, i32Mul, i32And, i32Store = 0x6a, 0x6c, 0x71, 0x36
)

var (
	i32Type, i64Type   = byte(0x7f), byte(0x7e)
	f32Type, f64Type   = byte(0x7d), byte(0x7c)
	v128Type, funcType = byte(0x7b), byte(0x70)
)

// forever repeats code.
func forever(body ...any) []byte { return code(opLoop, 0x40, code(body...), opBr, 0, opEnd) }

// events is a guest whose kv_events has so many i32 locals, from local 0 on.
func events(pages uint64, locals int, body []byte) guest {
	declared := [][]byte{code(leb(locals), int(i32Type))}
	return guest{pages: pages, funcs: []guestFunc{{name: abi.ExportEvents, locals: declared, code: body}}}
}

// unrolled repeats code often enough that a loop around it does not count.
func unrolled(body ...any) []byte { return bytes.Repeat(code(body...), 64) }

// next makes local 0 another number below 2^bits.
func next(bits int) []byte {
	return code(localGet, 0, i32(1664525), i32Mul, i32(1013904223), i32Add, i32(1<<bits-1), i32And, localSet, 0)
}

const vastPages, vastBits = 4096, 28 // 256 MiB

func constant(kind byte) []byte {
	switch kind {
	case i32Type:
		return i32(-0x12345678)
	case i64Type:
		return append([]byte{0x42}, sleb(-0x123456789abcdef)...)
	case f32Type: // subnormal
		return binary.LittleEndian.AppendUint32([]byte{0x43}, 12345)
	case f64Type:
		return binary.LittleEndian.AppendUint64([]byte{0x44}, 123456789)
	}
	return append([]byte{0xfd, 12}, bytes.Repeat([]byte{0x39, 0x30, 0, 0}, 4)...)
}

// operate applies an instruction to constants again and again, each time to its own result if it can be.
func operate(op []byte, result byte, operands ...byte) guest {
	var locals [][]byte
	var set, once []byte
	for i, kind := range append(operands, result) {
		locals = append(locals, []byte{1, kind})
		set = code(set, constant(kind), localSet, i)
	}
	for i := range operands {
		once = code(once, localGet, i)
	}
	to := len(operands)
	if i := slices.Index(operands, result); i >= 0 {
		to = i
	}
	if _, conversion := slices.BinarySearch([]byte{0xa8, 0xa9, 0xaa, 0xab, 0xae, 0xaf, 0xb0, 0xb1}, op[0]); conversion {
		to = len(operands)
	}
	once = code(once, op, localSet, to)
	all := code(set, forever(unrolled(once)))
	return guest{funcs: []guestFunc{{name: abi.ExportEvents, locals: locals, code: all}}}
}

// numeric are all instructions that calculate.
func numeric() (list []class) {
	add := func(name string, lo, hi int, result byte, operands ...byte) {
		for op := lo; op <= hi; op++ {
			g := operate([]byte{byte(op)}, result, operands...)
			list = append(list, class{name: fmt.Sprintf("%s 0x%02x", name, op), guest: g})
		}
	}
	I, L, F, D := i32Type, i64Type, f32Type, f64Type
	add("i32 compare", 0x46, 0x4f, I, I, I)
	add("i64 compare", 0x51, 0x5a, I, L, L)
	add("f32 compare", 0x5b, 0x60, I, F, F)
	add("f64 compare", 0x61, 0x66, I, D, D)
	add("i32 count", 0x67, 0x69, I, I)
	add("i32", 0x6a, 0x6c, I, I, I)
	add("i32", 0x6d, 0x70, I, I, I)
	add("i32", 0x71, 0x78, I, I, I)
	add("i64 count", 0x79, 0x7b, L, L)
	add("i64", 0x7c, 0x8a, L, L, L)
	add("f32", 0x8b, 0x91, F, F)
	add("f32", 0x92, 0x98, F, F, F)
	add("f64", 0x99, 0x9f, D, D)
	add("f64", 0xa0, 0xa6, D, D, D)
	add("wrap", 0xa7, 0xa7, I, L)
	add("truncate", 0xa8, 0xa9, I, F)
	add("truncate", 0xaa, 0xab, I, D)
	add("extend", 0xac, 0xad, L, I)
	add("truncate", 0xae, 0xaf, L, F)
	add("truncate", 0xb0, 0xb1, L, D)
	add("convert", 0xb2, 0xb3, F, I)
	add("convert", 0xb4, 0xb5, F, L)
	add("demote", 0xb6, 0xb6, F, D)
	add("convert", 0xb7, 0xb8, D, I)
	add("convert", 0xb9, 0xba, D, L)
	add("promote", 0xbb, 0xbb, D, F)
	for sub, types := range [][2]byte{{I, F}, {I, F}, {I, D}, {I, D}, {L, F}, {L, F}, {L, D}, {L, D}} {
		g := operate([]byte{0xfc, byte(sub)}, types[0], types[1])
		list = append(list, class{name: fmt.Sprintf("saturate 0xfc %d", sub), guest: g})
	}
	V := v128Type
	simd := func(sub int, result byte, operands ...byte) {
		g := operate(append([]byte{0xfd}, leb(sub)...), result, operands...)
		list = append(list, class{name: fmt.Sprintf("simd 0xfd %d", sub), guest: g})
	}
	for _, sub := range []int{
		77, 94, 95, 96, 97, 98, 103, 104, 105, 106, 116, 117, 122, 128, 129, 148, 160, 161, 224, 225, 227, 236, 237, 239, 248,
		249, 250, 251, 252, 253, 254, 255,
	} {
		simd(sub, V, V)
	}
	for _, sub := range []int{
		14, 35, 36, 65, 71, 78, 101, 110, 118, 130, 142, 149, 156, 174, 181, 186, 213, 214, 228, 229, 230, 231, 232, 233, 234,
		235, 240, 241, 242, 243, 244, 245, 246, 247,
	} {
		simd(sub, V, V, V)
	}
	for _, sub := range []int{107, 108, 109, 139, 140, 141, 171, 203, 204, 205} {
		simd(sub, V, V, i32Type)
	}
	for _, sub := range []int{83, 99, 100, 131, 163, 195} {
		simd(sub, i32Type, V)
	}
	return list
}

// recursion calls itself with so many locals alive.
func recursion(locals int, kind byte) guest {
	// Each local is changed before the call, and written to memory after it, which never happens.
	var before, after []byte
	add := []byte{0x6a}
	one := i32(1)
	if kind == v128Type {
		add, one = []byte{0xfd, 0xae, 0x01}, constant(v128Type)
	}
	store := []byte{i32Store, 0, 0}
	if kind == v128Type {
		store = []byte{0xfd, 11, 0, 0}
	}
	for i := range locals {
		before = code(before, 0x20, leb(i), one, add, localSet, leb(i))
		after = code(after, i32(0), 0x20, leb(i), store)
	}
	return guest{funcs: []guestFunc{{
		name: abi.ExportEvents, locals: [][]byte{code(leb(locals), int(kind))}, code: code(before, 0x10, 0, after),
	}}}
}

// wideFrame recurses through a function whose frame holds many values that it never computes.
func wideFrame(values int) guest {
	never := bytes.Repeat(code(i32(0), i32(0), 0x28, 2, 0, 0x10, 0, i32Store, 2, 0), values)
	body := code(i32(0), 0x28, 2, 0, 0x04, 0x40, opLoop, 0x40, never, opEnd, opEnd, 0x10, 0)
	return guest{funcs: []guestFunc{{name: abi.ExportEvents, code: body}}}
}

// setupExport is a function without a limit of time.
const setupExport = "setup"

// measure calls kv_events with so much fuel: processor time for each unit, and the longest time between two places
// where the host has control.
func (c *class) measure(t testing.TB, fuel uint64) (perUnit float64, longest time.Duration) {
	var last time.Duration
	clock := func() time.Duration {
		now := ThreadCPUTime()
		longest, last = max(longest, now-last), now
		return now
	}
	madvise = func(b []byte, advice int) error { // between two steps of growing others run, too
		defer clock()
		return unix.Madvise(b, advice)
	}
	defer func() { madvise = unix.Madvise }()
	code := c.guest.compiled(t, 65536, clock)
	in := c.guest.instance(t, code)
	if c.prepare {
		if _, err := spend(t, in, "prepare", 1<<40); err != nil {
			t.Fatal(c.name, err)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := ThreadCPUTime()
	last = start
	name := c.guest.funcs[0].name
	used, err := spend(t, in, name, fuel)
	took := clock() - start
	if (err == nil) != (name == setupExport) {
		t.Fatalf("%s: it ended with %v", c.name, err)
	}
	return float64(took) / float64(used), longest
}

// Each class of instruction: how long a unit of fuel takes at most. The baseline is an empty loop, measured beside
// each.
func BenchmarkOpcodes(b *testing.B) {
	const fuel, rounds = maxFuel, 5
	type row struct {
		name        string
		best, ratio float64
		longest     time.Duration
	}
	var rows []row
	baseline := class{guest: events(1, 1, forever())}
	for _, c := range slices.Concat(memoryClasses(), tableClasses(), callClasses(), hostClasses(), numeric()) {
		r := row{name: c.name, best: math.Inf(1), ratio: math.Inf(1), longest: time.Hour}
		for range rounds {
			base, _ := baseline.measure(b, fuel)
			took, longest := c.measure(b, fuel)
			r.best, r.ratio, r.longest = min(r.best, took), min(r.ratio, took/base), min(r.longest, longest)
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(x, y row) int { return int(math.Copysign(1, y.best-x.best)) })
	w := tabwriter.NewWriter(os.Stderr, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| class \t| ns per unit \t| times an empty loop \t| longest hold, us \t|")
	for _, r := range rows {
		fmt.Fprintf(w, "| %s \t| %.2f \t| %.0f \t| %d \t|\n", r.name, r.best, r.ratio, r.longest.Microseconds())
	}
	_ = w.Flush()
	for b.Loop() {
	}
}
