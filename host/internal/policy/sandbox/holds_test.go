package sandbox

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

// run calls kv_events, which is timed, and counts how often the host got control meanwhile.
func (g *guest) run(t *testing.T, fuel uint64) (in *Instance, controls int, used uint64, err error) {
	t.Helper()
	code := g.compiled(t, 65536, func() time.Duration { controls++; return 0 })
	in = g.instance(t, code)
	used, err = spend(t, in, abi.ExportEvents, fuel)
	return in, controls, used, err
}

// An instruction that leaves compiled code, or waits for memory, costs what it takes.
func TestCostsOfInstructions(t *testing.T) {
	tables := func(g guest) guest {
		g.tables = [][]byte{{funcType, 0, 10}}
		g.elements = [][]byte{{1, 0, 1, 0}}
		return g
	}
	const n = 100
	number := binary.LittleEndian.AppendUint64([]byte{0x44}, 123456789) // f64.const
	for _, c := range []struct {
		name  string
		once  []byte
		least uint64
	}{
		{"ref.func", []byte{0xd2, 0, opDrop}, 151},
		{"table.get", code(i32(1), 0x25, 0, opDrop), 10},
		{"table.set", code(i32(1), 0xd0, 0x70, 0x26, 0), 6},
		{"f64.mul", code(number, number, 0xa2, opDrop), 7},
		{"f32.demote", code(number, 0xb6, opDrop), 6},
		{"memory.grow", code(i32(0), 0x40, 0, opDrop), 500},
		{"table.grow", code(0xd0, 0x70, i32(0), 0xfc, 15, 0, opDrop), 500},
	} {
		g := tables(events(1, 1, bytes.Repeat(c.once, n)))
		if _, _, used, err := g.run(t, 1<<30); err != nil || used < n*c.least {
			t.Errorf("%s: %d units for %d, want %d each: %v", c.name, used, n, c.least, err)
		}
	}
}

// Copies and fills of any size give the host control between slices, and do what they should, also where source and
// destination overlap.
func TestBulkInSlices(t *testing.T) {
	testenv.Slow(t)
	const size, slice = 8 << 20, 512 << 10
	rng := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ to, from, n int }{
		{0, slice / 2, 5 * slice}, {slice / 2, 0, 5 * slice}, {1, 0, size - 1}, {0, 1, size - 1}, {0, 7 * slice, slice + 1},
		{7 * slice, 3, slice + 1}, {3, 4, slice}, {100, 100, 4 * slice}, {5, 0, 0}, {0, 6*slice + 17, 3*slice - 17},
	} {
		g := events(size>>16*2, 1, code(i32(c.to), i32(c.from), i32(c.n), 0xfc, 10, 0, 0))
		code := g.compiled(t, 65536, nil)
		in := g.instance(t, code)
		memory, _ := in.mem.Read(0, in.mem.Size())
		for i := 0; i < len(memory); i += 4 {
			*(*uint32)(unsafe.Pointer(&memory[i])) = rng.Uint32()
		}
		want := bytes.Clone(memory)
		copy(want[c.to:c.to+c.n], want[c.from:c.from+c.n])
		used, err := spend(t, in, abi.ExportEvents, 1<<30)
		if err != nil {
			t.Errorf("copy %+v: %v", c, err)
			continue
		}
		if !bytes.Equal(memory, want) {
			t.Errorf("copy %+v: wrong bytes", c)
		}
		if least := uint64(c.n / 8); used < least || used > least+1000 {
			t.Errorf("copy %+v: %d units, want about %d", c, used, least)
		}
	}
	for name, op := range map[string][]byte{
		"copy":           code(i32(0), i32(64<<20), i32(64<<20), 0xfc, 10, 0, 0),
		"copy backwards": code(i32(1), i32(0), i32(64<<20), 0xfc, 10, 0, 0),
		"fill":           code(i32(0), i32(7), i32(64<<20), 0xfc, 11, 0),
	} {
		g := events(2048, 1, op)
		in, controls, _, err := g.run(t, 1<<30)
		if err != nil || controls < 100 {
			t.Errorf("%s: the host got control %d times: %v", name, controls, err)
			continue
		}
		memory, _ := in.mem.Read(0, 64<<20)
		if name == "fill" && !bytes.Equal(memory, bytes.Repeat([]byte{7}, 64<<20)) {
			t.Error("fill: wrong bytes")
		}
	}
	for name, op := range map[string][]byte{
		"copy":  code(i32(0), i32(1), i32(size), 0xfc, 10, 0, 0),
		"wraps": code(i32(1), i32(0), i32(-1), 0xfc, 10, 0, 0),
		"fill":  code(i32(slice), i32(0), i32(size), 0xfc, 11, 0),
		"far":   code(i32(-1), i32(0), i32(size), 0xfc, 11, 0),
	} {
		g := events(size>>16, 1, op)
		_, _, _, err := g.run(t, 1<<30)
		var f *Fault
		if !errors.As(err, &f) || !strings.Contains(f.Reason, "out of bounds") {
			t.Errorf("%s beyond the memory: %v", name, err)
		}
	}
}

// Code without loops gives the host control too, whatever blocks it stands in.
func TestLongCodeGivesControl(t *testing.T) {
	testenv.Slow(t)
	const n = 40_000
	loads := bytes.Repeat(code(i32(0), 0x28, 2, 0, opDrop), n)
	for name, body := range map[string][]byte{
		"plain":            loads,
		"in a block":       code(0x02, 0x40, loads, opEnd),
		"in blocks":        code(bytes.Repeat(code(0x02, 0x40, loads[:len(loads)/8], opEnd), 8)),
		"in else":          code(i32(0), 0x04, 0x40, loads[:len(loads)/2], 0x05, loads[:len(loads)/2], opEnd),
		"around a loop":    code(loads[:len(loads)/2], opLoop, 0x40, opEnd, loads[:len(loads)/2]),
		"behind a branch":  code(0x02, 0x40, 0x02, 0x40, opBr, 1, opEnd, loads, opEnd, loads),
		"after a br_table": code(0x02, 0x40, i32(0), 0x0e, 1, 0, 0, opEnd, loads),
	} {
		g := events(1, 1, body)
		executed := bytes.Count(body, loads[:len(loads)/8])
		if name == "in else" || name == "behind a branch" {
			executed /= 2
		}
		least := uint64(executed) * n / 8 * 10 // a load, its address and drop
		_, controls, used, err := g.run(t, 1<<30)
		if err != nil || controls < int(least/nextSlice)-3 || used < least {
			t.Errorf("%s: the host got control %d times in %d of at least %d units: %v", name, controls, used, least, err)
		}
	}
}

// A guest does not wait for its memory to be made: its pages are there when it starts, and when it has grown much.
func TestMemoryIsPopulated(t *testing.T) {
	const pages = 64
	g := events(pages, 1, code(i32(pages), 0x40, 0, opDrop))
	in := g.instance(t, g.compiled(t, 1024, nil))
	check := func(what string) {
		memory, _ := in.mem.Read(0, in.mem.Size())
		resident := make([]byte, len(memory)/4096)
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)),
			uintptr(unsafe.Pointer(&resident[0])))
		if errno != 0 {
			t.Fatal(errno)
		}
		if there := bytes.Count(resident, []byte{1}); there != len(resident) {
			t.Errorf("%s: %d of %d pages are there", what, there, len(resident))
		}
	}
	check("at the start")
	if _, err := spend(t, in, abi.ExportEvents, 1<<30); err != nil {
		t.Fatal(err)
	}
	if in.MemorySize() != 2*pages<<16 {
		t.Fatalf("%d bytes", in.MemorySize())
	}
	check("after growing")
}

// Growing by much is done in steps: no system call makes more than 8 MiB, and the steps are what the guest asked for.
func TestMemoryGrowsInSteps(t *testing.T) {
	var steps []int
	madvise = func(b []byte, advice int) error {
		if advice == unix.MADV_POPULATE_WRITE {
			steps = append(steps, len(b))
		}
		return unix.Madvise(b, advice)
	}
	defer func() { madvise = unix.Madvise }()
	const pages = 4096
	g := events(1, 1, code(i32(pages), 0x40, 0, opDrop))
	g.funcs[0].name = setupExport
	in := g.instance(t, g.compiled(t, 65536, nil))
	if _, err := spend(t, in, setupExport, 1<<40); err != nil || in.MemorySize() != (pages+1)<<16 {
		t.Fatalf("%d bytes: %v", in.MemorySize(), err)
	}
	sum := 0
	for _, n := range steps {
		if sum += n; n > 8<<20 {
			t.Errorf("one step of %d bytes", n)
		}
	}
	if sum != pages<<16 {
		t.Errorf("%d steps made %d bytes, want %d", len(steps), sum, pages<<16)
	}
}

// Stacks stay small: a call whose frames are large pays for them, and one that nested too deeply is a fault even if it
// has returned.
func TestStacksAreBounded(t *testing.T) {
	testenv.Slow(t)
	// A function that calls itself so many times, with a frame of many values that it never makes.
	times := func(n, values int) guest {
		never := bytes.Repeat(code(i32(0), i32(0), 0x28, 2, 0, 0x10, 0, i32Store, 2, 0), values)
		never = code(i32(0), 0x28, 2, 0, 0x04, 0x40, opLoop, 0x40, never, opEnd, opEnd)
		again := code(0x23, 0, i32(-1), i32Add, 0x24, 0, 0x23, 0, 0x04, 0x40, 0x10, 0, opEnd)
		return guest{
			globals: [][]byte{code(int(i32Type), 1, i32(n), opEnd)},
			funcs:   []guestFunc{{name: abi.ExportEvents, code: code(never, again)}},
		}
	}
	for _, c := range []struct {
		name      string
		n, values int
		fuel      uint64
		is        error
	}{
		{"few small frames", 100, 0, 1 << 40, nil},
		{"many small frames", 1_000_000, 0, 1 << 40, errStack},
		{"few large frames", 20, 5000, 1 << 40, nil},
		{"many large frames", 1500, 5000, 1 << 40, errStack},
		{"with the fuel of a call", 1500, 5000, maxFuel, errStack},
	} {
		g := times(c.n, c.values)
		in := g.instance(t, g.compiled(t, 1, func() time.Duration { return 0 }))
		f := in.Export(abi.ExportEvents)
		err := in.Call(&f, 0, 0, Setup, c.fuel)
		if !errors.Is(err, c.is) || *f.stack > 4*maxStack {
			t.Errorf("%s: a stack of %d KiB: %v", c.name, *f.stack>>10, err)
		}
	}
}
