package sandbox

import (
	"encoding/binary"
	"log/slog"

	"github.com/kvhost/kvhost/abi"
	"github.com/tetratelabs/wazero/sys"
)

// wasiFunctions are the functions that the runtimes of Go, TinyGo, Rust and C always link. They give access to nothing:
// there are no files, no arguments and no environment. The clock advances by a fixed step per reading, random bytes
// come from the instance's seed, and standard output and error become log lines. So the operator need not allow these
// functions. The manifest must still request them, so that they are visible.
var wasiFunctions = map[string]hostFunction{
	"args_get":          wasi("ii", wasiNothing),
	"args_sizes_get":    wasi("ii", wasiNoList),
	"environ_get":       wasi("ii", wasiNothing),
	"environ_sizes_get": wasi("ii", wasiNoList),
	"clock_time_get":    wasi("iIi", wasiClock),
	"clock_res_get":     wasi("ii", wasiClockResolution),
	"random_get":        wasi("ii", wasiRandom),
	"sched_yield":       wasi("", wasiNothing),
	"poll_oneoff":       wasi("iiii", wasiPoll),
	"fd_write":          wasi("iiii", wasiWrite),
	"proc_exit":         {abi.GrantWASIStub, "i", "", wasiExit},

	"fd_close":            wasi("i", wasiNoFile),
	"fd_fdstat_get":       wasi("ii", wasiNoFile),
	"fd_fdstat_set_flags": wasi("ii", wasiNoFile),
	"fd_filestat_get":     wasi("ii", wasiNoFile),
	"fd_prestat_get":      wasi("ii", wasiNoFile),
	"fd_prestat_dir_name": wasi("iii", wasiNoFile),
	"fd_read":             wasi("iiii", wasiNoFile),
	"fd_seek":             wasi("iIii", wasiNoFile),
}

const (
	errnoSuccess = 0
	errnoBadf    = 8
	errnoFault   = 21
	errnoNosys   = 52
)

func wasi(params string, call func(*Instance, []uint64) uint64) hostFunction {
	return hostFunction{abi.GrantWASIStub, params, "i", func(in *Instance, stack []uint64) {
		errno := call(in, stack)
		if len(stack) > 0 {
			stack[0] = errno
		}
	}}
}

func wasiNothing(*Instance, []uint64) uint64 { return errnoSuccess }
func wasiNoFile(*Instance, []uint64) uint64  { return errnoBadf }

func wasiNoList(in *Instance, stack []uint64) uint64 {
	if !in.mem.WriteUint32Le(uint32(stack[0]), 0) || !in.mem.WriteUint32Le(uint32(stack[1]), 0) {
		return errnoFault
	}
	return errnoSuccess
}

// wasiEpoch is the start of the stub's clock: 2022-01-01. The clock must advance, or a runtime that waits for it would
// spin.
const wasiEpoch, wasiTick = 1640995200e9, 1e6

func wasiClock(in *Instance, stack []uint64) uint64 {
	in.ticks++
	if !in.mem.WriteUint64Le(uint32(stack[2]), wasiEpoch+in.ticks*wasiTick) {
		return errnoFault
	}
	return errnoSuccess
}

func wasiClockResolution(in *Instance, stack []uint64) uint64 {
	if !in.mem.WriteUint64Le(uint32(stack[1]), wasiTick) {
		return errnoFault
	}
	return errnoSuccess
}

func wasiRandom(in *Instance, stack []uint64) uint64 {
	b, ok := in.mem.Read(uint32(stack[0]), uint32(stack[1]))
	if !ok {
		return errnoFault
	}
	for i := 0; len(b) > 0; i++ {
		if i%1024 == 0 {
			in.charge(uint64(min(len(b), 8*1024)))
		}
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], in.random())
		b = b[copy(b, word[:]):]
	}
	return errnoSuccess
}

// wasiPoll fails: a policy cannot sleep without blocking the host.
func wasiPoll(*Instance, []uint64) uint64 { return errnoNosys }

func wasiWrite(in *Instance, stack []uint64) uint64 {
	fd, iovs, count := uint32(stack[0]), uint32(stack[1]), uint32(stack[2])
	if fd != 1 && fd != 2 {
		return errnoBadf
	}
	var written uint64
	for i := range min(count, 64) {
		ptr, ok1 := in.mem.ReadUint32Le(iovs + 8*i)
		n, ok2 := in.mem.ReadUint32Le(iovs + 8*i + 4)
		b, ok3 := in.mem.Read(ptr, n)
		if !ok1 || !ok2 || !ok3 {
			return errnoFault
		}
		in.charge(importFuel + 8*uint64(len(b)))
		in.print(b)
		written += uint64(n)
	}
	if !in.mem.WriteUint32Le(uint32(stack[3]), uint32(written)) {
		return errnoFault
	}
	return errnoSuccess
}

func wasiExit(_ *Instance, stack []uint64) { panic(sys.NewExitError(uint32(stack[0]))) }

// print collects standard output and error into lines, and keeps the beginning as the text of a fault.
func (in *Instance) print(b []byte) {
	if room := maxTextBytes - len(in.failText); room > 0 {
		in.failText = append(in.failText, b[:min(len(b), room)]...)
	}
	for _, c := range b {
		if c == '\n' || len(in.line) == maxTextBytes {
			in.log(slog.LevelWarn, in.line)
			in.line = in.line[:0]
		}
		if c != '\n' {
			in.line = append(in.line, c)
		}
	}
}
