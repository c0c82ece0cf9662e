package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/policy/meter"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/sys"
)

// instance is one running guest, and the only place from which one is called. It is used by one goroutine at a time.
// After a fault it is dead: its memory is given back and every later call returns the fault.
type instance struct {
	m      *Module
	meter  *meter
	ctx    context.Context // carries the instance to host functions
	mod    api.Module
	mem    api.Memory
	fuel   api.MutableGlobal // of the slice under way; nil when not metered
	ration ration
	stack  [3]uint64
	bufs   [abi.BufferKinds]buffer
	names  export // kv_namespace, or none
	dead   error

	now   uint64 // what now_ns answers: frozen per call
	seed  uint64 // state of rand_u64
	ticks uint64 // readings of the stub's clock
	said  []byte // the guest's words for a fault
	line  []byte // output that has no line break yet
}

type buffer struct{ ptr, size uint32 }

// export is one of the guest's functions, looked up once.
type export struct {
	name   string
	fn     api.Function
	waited bool // for, with a root or a role held by others meanwhile
}

type instanceKey struct{}

// instanceContext is the context of guest calls. wazero asks it for values on each call, so that it answers fast.
type instanceContext struct {
	context.Context
	in *instance
}

func (c *instanceContext) Value(key any) any {
	if _, ok := key.(instanceKey); ok {
		return c.in
	}
	return nil
}

const bufferAlign = 16

// instantiate starts a guest and gives it its Info. ctx is for starting only: guest calls cannot be interrupted.
func (m *Module) instantiate(ctx context.Context, s *settings, t *meter) (*instance, error) {
	config, err := s.config.text()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	in := &instance{m: m, meter: t, seed: s.seed}
	in.ctx = &instanceContext{Context: context.Background(), in: in}
	// No start functions here: _initialize is a guest call like any other.
	in.mod, err = m.code.runtime.InstantiateModule(experimental.WithMemoryAllocator(in.ctx, allocator), m.code.compiled,
		wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		return nil, fmt.Errorf("%w: %s: cannot start: %w", ErrBadModule, m.name, err)
	}
	in.mem = in.mod.Memory()
	if in.fuel, _ = in.mod.ExportedGlobal(metering.Global).(api.MutableGlobal); in.fuel == nil && !m.code.unmetered {
		in.close()
		return nil, fmt.Errorf("%w: %s: its compiled form counts no fuel", ErrBadModule, m.name)
	}
	if err := in.start(s, config); err != nil {
		in.close()
		return nil, err
	}
	return in, nil
}

func (in *instance) start(s *settings, config string) error {
	if f := in.export(abi.ExportInitialize); f.fn != nil {
		if err := in.call(&f, 0, 0, setup, setupFuel); err != nil {
			return err
		}
	}
	if s.bare {
		return nil
	}
	size := uint32(abi.InfoSize + len(config))
	if err := in.buffer(abi.BufferInfo, size); err != nil {
		return err
	}
	b, err := in.view(abi.BufferInfo, size)
	if err != nil {
		return err
	}
	*(*abi.Info)(unsafe.Pointer(&b[0])) = abi.Info{
		Size: abi.InfoSize, ABI: abi.Version,
		EventStride: abi.EventSize + s.longer, AskStride: abi.AskSize + s.longer, AdmitStride: abi.CandidateSize + s.longer,
		PlaceStride: abi.PlaceQuerySize + s.longer, PathStride: abi.PathRefSize + s.longer, PlaneStride: abi.PlaneSize + s.longer,
		RootStride: abi.RootFactsSize + s.longer,
		MaxSlots:   s.maxSlots, MaxBatch: batchSize, MaxVictims: maxVictims, MaxNamespaces: s.namespaces,
		ConfigLen: uint32(len(config)), Capacity: s.capacity, Seed: s.seed,
	}
	copy(b[abi.InfoSize:], config)
	f := in.export(abi.ExportInit)
	if err := in.call(&f, uint64(size), 0, setup, setupFuel+slotSetupFuel*uint64(s.maxSlots)); err != nil {
		return err
	}
	if status := abi.Status(int32(uint32(in.stack[0]))); status != abi.StatusOK {
		fault := in.fault(f.name, fmt.Sprintf("refused its settings with status %d", status), ErrConfig)
		fault.Status = status
		return fault
	}
	in.names = in.export(abi.ExportNamespace)
	if all, ok := in.mem.Read(0, in.mem.Size()); ok {
		populate(all)
	}
	return nil
}

func (in *instance) export(name string) export {
	waited := name == abi.ExportEvents || name == abi.ExportStep || name == abi.ExportAdmit || name == abi.ExportPlace || name == abi.ExportUnplace
	return export{name, in.mod.ExportedFunction(name), waited}
}

// call is where the host enters guest code, which may spend so much fuel. The result is left in in.stack[0].
func (in *instance) call(f *export, a, b uint64, records int, fuel uint64) error {
	if in.dead != nil {
		return in.dead
	}
	if len(in.said) > 0 {
		in.said = in.said[:0]
	}
	in.stack[0], in.stack[1] = a, b
	if in.fuel != nil {
		in.begin(f, fuel)
	}
	start := in.meter.begin(records)
	err := f.fn.CallWithStack(in.ctx, in.stack[:])
	in.meter.done(start)
	if in.fuel != nil {
		left := in.end()
		in.meter.spend(fuel - uint64(max(0, left)))
		if left < 0 || in.ration.refused != nil {
			return in.exhausted(f.name, fuel, err)
		}
	}
	if err != nil {
		return in.trap(f.name, err)
	}
	return nil
}

// status calls an export that answers with a status. ok is false when the guest leaves the answer to the host.
func (in *instance) status(f *export, a, b uint64, records int, fuel uint64) (ok bool, err error) {
	if err := in.call(f, a, b, records, fuel); err != nil {
		return false, err
	}
	return in.judge(f, abi.Status(int32(uint32(in.stack[0]))))
}

// count calls an export that answers with status and count.
func (in *instance) count(f *export, a, b uint64, records int, fuel uint64) (n uint32, ok bool, err error) {
	if err := in.call(f, a, b, records, fuel); err != nil {
		return 0, false, err
	}
	status, n := abi.Unpack(in.stack[0])
	ok, err = in.judge(f, status)
	return n, ok, err
}

func (in *instance) judge(f *export, status abi.Status) (bool, error) {
	if status < 0 {
		fault := in.fault(f.name, fmt.Sprintf("answered status %d", status), nil)
		fault.Status = status
		return false, fault
	}
	return status == abi.StatusOK, nil
}

// buffer asks the guest for room.
func (in *instance) buffer(kind int, size uint32) error {
	f := in.export(abi.ExportBuffer)
	if err := in.call(&f, uint64(kind), uint64(size), setup, setupFuel); err != nil {
		return err
	}
	if uint32(in.stack[0]) == 0 {
		return in.fault(f.name, fmt.Sprintf("gave no room of %d bytes for kind %d", size, kind), nil)
	}
	return in.accept(&f, kind, size)
}

func (in *instance) accept(f *export, kind int, size uint32) error {
	ptr := uint32(in.stack[0])
	if ptr%bufferAlign != 0 {
		return in.fault(f.name, fmt.Sprintf("gave %#x for kind %d, which is not a multiple of %d", ptr, kind, bufferAlign), nil)
	}
	for other, b := range in.bufs {
		if other != kind && uint64(ptr) < uint64(b.ptr)+uint64(b.size) && uint64(b.ptr) < uint64(ptr)+uint64(size) {
			return in.fault(f.name, fmt.Sprintf("gave %d bytes at %#x for kind %d, which overlap those of kind %d", size, ptr, kind, other), nil)
		}
	}
	in.bufs[kind] = buffer{ptr, size}
	_, err := in.view(kind, size)
	return err
}

// offer asks for room that the guest may do without.
func (in *instance) offer(kind int, size uint32) error {
	f := in.export(abi.ExportBuffer)
	if err := in.call(&f, uint64(kind), uint64(size), setup, setupFuel); err != nil {
		return err
	}
	if in.stack[0] == 0 {
		return nil
	}
	return in.accept(&f, kind, size)
}

// view is the first n bytes of a buffer, valid until the next call. It is checked against the memory each time: a guest
// may have grown it, and a buffer that was never given has no bytes.
func (in *instance) view(kind int, n uint32) ([]byte, error) {
	if in.dead != nil {
		return nil, in.dead
	}
	at := in.bufs[kind]
	b, ok := in.mem.Read(at.ptr, n)
	if !ok || n > at.size || at.ptr == 0 {
		return nil, in.fault(abi.ExportBuffer, fmt.Sprintf("%d bytes at %#x of kind %d lie outside its memory of %d bytes", n, at.ptr, kind, in.mem.Size()), nil)
	}
	return b, nil
}

// namespace gives the guest a namespace's text.
func (in *instance) namespace(id uint32, text string) error {
	if in.names.fn == nil {
		return in.dead
	}
	size := uint32(len(text))
	if in.bufs[abi.BufferInfo].size < size {
		if err := in.buffer(abi.BufferInfo, size); err != nil {
			return err
		}
	}
	b, err := in.view(abi.BufferInfo, size)
	if err != nil {
		return err
	}
	copy(b, text)
	_, err = in.status(&in.names, uint64(id), uint64(size), setup, maxFuel+textFuel*uint64(size))
	return err
}

// trap turns what wazero returns into a fault.
func (in *instance) trap(name string, err error) error {
	text, stack, _ := strings.Cut(err.Error(), "wasm stack trace:")
	text = strings.TrimSpace(strings.TrimPrefix(text, "wasm error: "))
	var exit *sys.ExitError
	if errors.As(err, &exit) {
		text = fmt.Sprintf("exited with code %d", exit.ExitCode())
	}
	fault := in.fault(name, text, err)
	fault.Stack = strings.TrimSpace(stack)
	return fault
}

func stackOf(err error) string {
	if err == nil {
		return ""
	}
	_, stack, _ := strings.Cut(err.Error(), "wasm stack trace:")
	return strings.TrimSpace(stack)
}

// charge takes fuel for work that the host does at the guest's word, and ends the call when there is too little.
func (in *instance) charge(n uint64) {
	if in.fuel == nil {
		return
	}
	left := int64(in.fuel.Get()) - int64(n)
	if in.fuel.Set(uint64(left)); left < 0 {
		in.refuel()
	}
}

// fault ends the instance: a guest that broke the contract once has a state that nobody knows.
func (in *instance) fault(name, reason string, cause error) *Fault {
	f := &Fault{Module: in.m.name, Export: name, Reason: reason, Cause: cause, Text: strings.TrimSpace(string(in.said))}
	if in.dead == nil {
		in.meter.faults.Add(1)
		in.dead = f
		in.shut()
	}
	return f
}

func (in *instance) close() {
	if in.dead == nil {
		in.dead = ErrClosed
		in.shut()
	}
}

// shut gives the memory back: much of it beside the caller, because that takes milliseconds.
func (in *instance) shut() {
	in.bufs = [abi.BufferKinds]buffer{}
	if mod := in.mod; in.mem.Size() > slowToFree {
		in.m.ending.Go(func() { _ = mod.Close(context.Background()) })
		return
	}
	_ = in.mod.Close(context.Background())
}

// text reads what the guest points at, at most maxTextBytes of it.
func (in *instance) text(ptr, n uint64) ([]byte, bool) {
	return in.mem.Read(uint32(ptr), min(uint32(n), maxTextBytes))
}

func (in *instance) log(level slog.Level, text []byte) {
	if !in.m.log.Enabled(context.Background(), level) {
		return
	}
	dropped, ok := in.m.lines.take(time.Now())
	if dropped > 0 {
		in.m.log.Warn("lines of the policy were dropped", "lines", dropped, "most_per_second", logBurst)
	}
	if ok {
		in.charge(lineFuel)
		in.m.log.Log(context.Background(), level, strings.ToValidUTF8(string(text), "?"))
	}
}

// random is splitmix64.
func (in *instance) random() uint64 {
	in.seed += 0x9e3779b97f4a7c15
	z := in.seed
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// records is a buffer's beginning as n records.
func records[T any](in *instance, kind int, n uint32) ([]T, error) {
	b, err := in.view(kind, n*uint32(unsafe.Sizeof(*new(T))))
	if err != nil || n == 0 {
		return nil, err
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}
