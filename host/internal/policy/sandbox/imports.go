package sandbox

import (
	"context"
	"log/slog"

	"github.com/kvhost/kvhost/abi"
	"github.com/tetratelabs/wazero/api"
)

// hostFunction is a function that a guest may import. The call's context carries the instance, so that one host module
// serves all instances of a runtime.
type hostFunction struct {
	grant   string // empty: always granted
	params  string
	results string
	call    func(in *Instance, stack []uint64)
}

func (f hostFunction) sig() string { return f.params + ">" + f.results }

// hostFunctions holds all host functions, by module and name.
var hostFunctions = map[string]map[string]hostFunction{
	abi.ImportModule: {
		abi.ImportLogEnabled: {"", "i", "i", logEnabled},
		abi.ImportLog:        {"", "iii", "", logText},
		abi.ImportFail:       {"", "ii", "", failText},
		abi.ImportNow:        {abi.GrantClock, "", "I", now},
		abi.ImportCounterAdd: {abi.GrantMetrics, "iI", "", counterAdd},
		abi.ImportRand:       {abi.GrantRandom, "", "I", random},
	},
	abi.ImportWASI: wasiFunctions,
}

func (f hostFunction) Call(ctx context.Context, _ api.Module, stack []uint64) {
	in, ok := ctx.Value(instanceKey{}).(*Instance)
	if !ok {
		panic("policy: a guest function was not called through its instance")
	}
	in.charge(importFuel)
	f.call(in, stack)
}

func wasmTypes(sig string) []api.ValueType {
	var t []api.ValueType
	for _, c := range sig {
		if c == 'I' {
			t = append(t, api.ValueTypeI64)
		} else {
			t = append(t, api.ValueTypeI32)
		}
	}
	return t
}

// Bounds of a guest's log output.
const (
	maxTextBytes = 1024
	logBurst     = 64 // lines per module and second
)

// A call into the host costs about the fuel of the same time in the guest.
const (
	importFuel = 400
	lineFuel   = 10_000 // a line that is logged
)

var logLevels = [...]slog.Level{
	abi.LevelDebug: slog.LevelDebug, abi.LevelInfo: slog.LevelInfo, abi.LevelWarn: slog.LevelWarn, abi.LevelError: slog.LevelError,
}

func logLevel(v uint64) slog.Level { return logLevels[min(uint64(uint32(v)), abi.LevelError)] }

func logEnabled(in *Instance, stack []uint64) {
	stack[0] = b2u(in.code.log.Enabled(context.Background(), logLevel(stack[0])))
}

func b2u(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func logText(in *Instance, stack []uint64) {
	if text, ok := in.text(stack[1], stack[2]); ok {
		in.log(logLevel(stack[0]), text)
	}
}

func failText(in *Instance, stack []uint64) {
	if text, ok := in.text(stack[0], stack[1]); ok {
		in.failText = append(in.failText[:0], text...)
	}
}

func now(in *Instance, stack []uint64) { stack[0] = in.now }

func counterAdd(in *Instance, stack []uint64) {
	if id := uint32(stack[0]); uint64(id) < uint64(len(in.code.counters)) {
		in.code.counters[id].Add(int64(stack[1]))
	}
}

func random(in *Instance, stack []uint64) { stack[0] = in.random() }
