package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/sys"
)

// Instance is one running guest. All calls into guest code go through it. It is for one goroutine at a time. After a
// fault it is dead: its memory is released and every later call returns the fault.
type Instance struct {
	code   *Code
	usage  *Usage
	ctx    context.Context // carries the instance to host functions
	mod    api.Module
	mem    api.Memory
	memory *boundedMemory    // memory of mem
	fuel   api.MutableGlobal // the fuel counter of the current slice; nil if the code is not metered
	budget fuelBudget
	stack  [3]uint64
	bufs   [abi.BufferKinds]buffer
	names  Export // the export kv_namespace, if there is one
	dead   error

	now      uint64 // the result of now_ns, constant during a call
	seed     uint64 // state of rand_u64
	ticks    uint64 // readings of the stub's clock
	failText []byte // the guest's own description of a fault
	line     []byte // output after the last line break
}

// Export is one of the guest's functions, looked up once.
type Export struct {
	Name  string
	fn    api.Function
	timed bool // the CPU time is limited, because the call holds a root or a role that others wait for
	stack *int // points to the size of its stack
}

// Exists reports whether the guest exports the function.
func (f *Export) Exists() bool { return f.fn != nil }

// Settings are the settings of an instance at its start.
type Settings struct {
	MaxSlots      uint32
	MaxNamespaces uint32
	Capacity      uint64
	Seed          uint64
	Config        string // lines "key=value\n"
	MemoryPages   uint32 // the operator's limit; 0: the default
	Memory        *MemoryBudget
	ExtraStride   uint32 // bytes to add to the size of every record, a multiple of 8; for probes
	Bare          bool   // do not call kv_init; for probes
}

type instanceKey struct{}

// instanceContext is the context of guest calls. wazero reads values of it on each call, so it must be fast.
type instanceContext struct {
	context.Context
	in *Instance
}

func (c *instanceContext) Value(key any) any {
	if _, ok := key.(instanceKey); ok {
		return c.in
	}
	return nil
}

// Instantiate starts a guest, which counts its calls in u. ctx bounds the start only, since guest calls cannot be
// interrupted.
func (c *Code) Instantiate(ctx context.Context, s *Settings, u *Usage) (*Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	in := &Instance{code: c, usage: u, seed: s.Seed}
	in.ctx = &instanceContext{Context: context.Background(), in: in}
	// No start functions here: _initialize is a guest call like any other.
	var err error
	if in.memory, err = c.memory(s, u); err != nil {
		return nil, fmt.Errorf("%s: cannot start: %w", c.name, err)
	}
	allocator := experimental.MemoryAllocatorFunc(func(_, _ uint64) experimental.LinearMemory { return in.memory })
	in.mod, err = c.runtime.InstantiateModule(experimental.WithMemoryAllocator(in.ctx, allocator), c.compiled,
		wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		in.memory.Free()
		return nil, fmt.Errorf("%w: %s: cannot start: %w", ErrBadModule, c.name, err)
	}
	in.mem = in.mod.Memory()
	if in.fuel, _ = in.mod.ExportedGlobal(meter.Global).(api.MutableGlobal); in.fuel == nil {
		in.Close()
		return nil, fmt.Errorf("%w: %s: its compiled form counts no fuel", ErrBadModule, c.name)
	}
	if err := in.start(s); err != nil {
		in.Close()
		return nil, err
	}
	return in, nil
}

func (in *Instance) start(s *Settings) error {
	if f := in.Export(abi.ExportInitialize); f.fn != nil {
		if err := in.Call(&f, 0, 0, Setup, setupFuel); err != nil {
			return err
		}
	}
	if s.Bare {
		return nil
	}
	size := uint32(abi.InfoSize + len(s.Config))
	if err := in.RequireBuffer(abi.BufferInfo, size); err != nil {
		return err
	}
	b, err := in.View(abi.BufferInfo, size)
	if err != nil {
		return err
	}
	*(*abi.Info)(unsafe.Pointer(&b[0])) = abi.Info{
		Features: abi.FeatureHints | abi.FeatureLevels,
		Size:     abi.InfoSize, ABI: abi.Version,
		EventStride: abi.EventSize + s.ExtraStride, AskStride: abi.AskSize + s.ExtraStride,
		AdmitStride: abi.CandidateSize + s.ExtraStride, PlaceStride: abi.PlaceQuerySize + s.ExtraStride,
		PlaneStride: abi.PlaneSize + s.ExtraStride,
		RootStride:  abi.RootFactsSize + s.ExtraStride,
		MaxSlots:    s.MaxSlots, MaxBatch: MaxBatch, MaxVictims: MaxVictims, MaxNamespaces: s.MaxNamespaces,
		ConfigLen: uint32(len(s.Config)), Capacity: s.Capacity, Seed: s.Seed,
	}
	copy(b[abi.InfoSize:], s.Config)
	f := in.Export(abi.ExportInit)
	if err := in.Call(&f, uint64(size), 0, Setup, setupFuel+slotSetupFuel*uint64(s.MaxSlots)); err != nil {
		return err
	}
	if status := abi.Status(int32(uint32(in.stack[0]))); status != abi.StatusOK {
		fault := in.Fault(f.Name, fmt.Sprintf("refused its settings with status %d", status), ErrConfig)
		fault.Status = status
		return fault
	}
	in.names = in.Export(abi.ExportNamespace)
	if all, ok := in.mem.Read(0, in.mem.Size()); ok {
		populate(all)
	}
	return nil
}

// Export looks up a function of the guest.
func (in *Instance) Export(name string) Export {
	timed := name == abi.ExportEvents || name == abi.ExportStep || name == abi.ExportAdmit || name == abi.ExportPlace
	fn := in.mod.ExportedFunction(name)
	return Export{name, fn, timed, stackSize(fn)}
}

// Call enters guest code with the given fuel. [Instance.Result] has the result. records is the number of records handed
// over, or [Setup].
func (in *Instance) Call(f *Export, a, b uint64, records int, fuel uint64) error {
	if in.dead != nil {
		return in.dead
	}
	if len(in.failText) > 0 {
		in.failText = in.failText[:0]
	}
	in.stack[0], in.stack[1] = a, b
	in.grantFirst(f, fuel)
	start := in.usage.Begin(records)
	err := f.fn.CallWithStack(in.ctx, in.stack[:])
	in.usage.End(start)
	left := in.settleFuel()
	in.usage.Fuel.Add(fuel - uint64(max(0, left)))
	if left < 0 || in.budget.aborted != nil {
		return in.exhausted(f.Name, fuel, err)
	}
	if err != nil {
		return in.trap(f.Name, err)
	}
	if *f.stack > maxStack {
		return in.Fault(f.Name, stackTooLarge(*f.stack).Error(), errStack)
	}
	return nil
}

// Result returns the raw result of the last call.
func (in *Instance) Result() uint64 { return in.stack[0] }

// Status calls an export that returns a status. ok is false if the guest leaves the answer to the host.
func (in *Instance) Status(f *Export, a, b uint64, records int, fuel uint64) (ok bool, err error) {
	if err := in.Call(f, a, b, records, fuel); err != nil {
		return false, err
	}
	return in.judge(f, abi.Status(int32(uint32(in.stack[0]))))
}

// Count calls an export that returns a status and a count.
func (in *Instance) Count(f *Export, a, b uint64, records int, fuel uint64) (n uint32, ok bool, err error) {
	if err := in.Call(f, a, b, records, fuel); err != nil {
		return 0, false, err
	}
	status, n := abi.Unpack(in.stack[0])
	ok, err = in.judge(f, status)
	return n, ok, err
}

func (in *Instance) judge(f *Export, status abi.Status) (bool, error) {
	if status < 0 {
		fault := in.Fault(f.Name, fmt.Sprintf("answered status %d", status), nil)
		fault.Status = status
		return false, fault
	}
	return status == abi.StatusOK, nil
}

// Namespace passes a namespace's text to the guest.
func (in *Instance) Namespace(id uint32, text string) error {
	if in.names.fn == nil {
		return in.dead
	}
	size := uint32(len(text))
	if in.bufs[abi.BufferInfo].size < size {
		if err := in.RequireBuffer(abi.BufferInfo, size); err != nil {
			return err
		}
	}
	b, err := in.View(abi.BufferInfo, size)
	if err != nil {
		return err
	}
	copy(b, text)
	_, err = in.Status(&in.names, uint64(id), uint64(size), Setup, maxFuel+textFuel*uint64(size))
	return err
}

// trap turns an error of wazero into a fault.
func (in *Instance) trap(name string, err error) error {
	text, _, _ := strings.Cut(err.Error(), "wasm stack trace:")
	text = strings.TrimSpace(strings.TrimPrefix(text, "wasm error: "))
	if exit, ok := errors.AsType[*sys.ExitError](err); ok {
		text = fmt.Sprintf("exited with code %d", exit.ExitCode())
	}
	fault := in.Fault(name, text, err)
	fault.Stack = stackOf(err)
	return fault
}

// maxStackText is the most bytes of a guest's stack in an error. Types of parameters are most of a long stack.
const maxStackText = 2048

func stackOf(err error) string {
	if err == nil {
		return ""
	}
	_, stack, _ := strings.Cut(err.Error(), "wasm stack trace:")
	return meter.Printable(strings.Join(strings.Fields(stack), " "), maxStackText)
}

// charge takes fuel for work of the host on the guest's behalf, and aborts the call if there is too little.
func (in *Instance) charge(n uint64) {
	left := int64(in.fuel.Get()) - int64(n)
	if in.fuel.Set(uint64(left)); left < 0 {
		in.refuel()
	}
}

// Fault kills the instance, because the state of a guest that broke the contract is unknown.
func (in *Instance) Fault(name, reason string, cause error) *Fault {
	if refused := in.memory.refused; refused != nil {
		reason = fmt.Sprintf("%s; before that: %v", reason, refused)
	}
	f := &Fault{Module: in.code.name, Export: name, Reason: reason, Cause: cause,
		Text: strings.TrimSpace(string(in.failText))}
	if in.dead == nil {
		in.usage.Faults.Add(1)
		in.dead = f
		in.shut()
	}
	return f
}

// Close ends the instance. Later calls return [ErrClosed], or the fault that came first.
func (in *Instance) Close() {
	if in.dead == nil {
		in.dead = ErrClosed
		in.shut()
	}
}

// shut releases the memory. A large memory is released in another goroutine, because that takes milliseconds.
func (in *Instance) shut() {
	in.bufs = [abi.BufferKinds]buffer{}
	if mod := in.mod; in.mem.Size() > slowToFree {
		in.code.closing.Go(func() { _ = mod.Close(context.Background()) })
		return
	}
	_ = in.mod.Close(context.Background())
}

func (in *Instance) log(level slog.Level, text []byte) {
	if !in.code.log.Enabled(context.Background(), level) {
		return
	}
	dropped, ok := in.code.lines.take(time.Now())
	if dropped > 0 {
		in.code.log.Warn("policy logs too much: lines dropped", "lines", dropped, "limit_per_second", logBurst)
	}
	if ok {
		in.charge(lineFuel)
		in.code.log.Log(context.Background(), level, LogMessage, "text", meter.Printable(string(text), maxTextBytes))
	}
}

// Dead returns the error of an instance that accepts no more calls; nil while it is alive.
func (in *Instance) Dead() error { return in.dead }

func (in *Instance) SetNow(nanoseconds uint64) { in.now = nanoseconds }

// FailText returns the guest's own description of the last failure.
func (in *Instance) FailText() string { return string(in.failText) }

// MemorySize returns the size of the guest's memory in bytes.
func (in *Instance) MemorySize() uint64 { return uint64(in.mem.Size()) }

// random returns the next number of splitmix64.
func (in *Instance) random() uint64 {
	in.seed += 0x9e3779b97f4a7c15
	z := in.seed
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
