package policy

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// ProbeOptions configure the guest of a [Probe].
type ProbeOptions struct {
	Role          abi.Role
	MaxSlots      uint32
	MaxNamespaces uint32 // 0: 1,024
	Capacity      uint64
	Seed          uint64
	Config        Config
	ExtraStride   uint32 // bytes to add to the size of every record, a multiple of 8
	Bare          bool   // call _initialize only, not kv_init
}

// Probe is one guest with direct calls of its exports, each with the fuel of a host. It is for programs that judge
// modules: unlike a role, it returns raw results, and its user can write any bytes.
type Probe struct {
	m        *Module
	in       *sandbox.Instance
	usage    sandbox.Usage
	settings settings

	// Used and Allowed are the fuel of the last call.
	Used, Allowed uint64
}

// Probe starts a guest of a module that is not native.
func (m *Module) Probe(ctx context.Context, o ProbeOptions) (*Probe, error) {
	p := &Probe{m: m, settings: settings{role: o.Role, config: o.Config}}
	p.settings.Settings = sandbox.Settings{
		MaxSlots: o.MaxSlots, MaxNamespaces: o.MaxNamespaces, Capacity: o.Capacity, Seed: o.Seed,
		ExtraStride: o.ExtraStride, Bare: o.Bare,
	}
	if m.code == nil {
		return nil, fmt.Errorf("%w: %s is native", ErrBadModule, m.name)
	}
	if err := m.prepare(&p.settings); err != nil {
		return nil, err
	}
	var err error
	p.in, err = m.instantiate(ctx, &p.settings, &p.usage)
	p.Used, p.Allowed = p.usage.Fuel.Load(), m.code.Limits().ForExport(abi.ExportInit, 0, o.MaxSlots)
	return p, err
}

// Limits returns the limits in the guest's Info.
func (p *Probe) Limits() (batch, victims, namespaces, roots int) {
	return p.m.code.Limits().Batch(), sandbox.MaxVictims, int(p.settings.MaxNamespaces), maxRoots
}

// Buffer requests a buffer; it can be called again. ok is false if the guest refuses an optional buffer.
func (p *Probe) Buffer(kind int, size uint32) (ok bool, err error) {
	before := p.usage.Fuel.Load()
	err = p.in.OfferBuffer(kind, size)
	p.Used, p.Allowed = p.usage.Fuel.Load()-before, p.m.code.Limits().ForExport(abi.ExportBuffer, 0, 0)
	return err == nil && p.in.HasBuffer(kind, size), err
}

// Bytes returns the beginning of a buffer, for reads and writes until the next call.
func (p *Probe) Bytes(kind int, n uint32) ([]byte, error) { return p.in.View(kind, n) }

// Call calls an export and returns the raw result. The fuel is that of the given records: those of a batch, the pages
// of a layout, or the bytes of a text or a state. An error is a trap or exhausted fuel, and ends the guest.
func (p *Probe) Call(name string, a, b uint64, records int) (uint64, error) {
	f := p.in.Export(name)
	if !f.Exists() {
		return 0, fmt.Errorf("%w: %s does not export %s", ErrBadModule, p.m.name, name)
	}
	p.Allowed = p.m.code.Limits().ForExport(name, records, p.settings.MaxSlots)
	before := p.usage.Fuel.Load()
	err := p.in.Call(&f, a, b, records, p.Allowed)
	p.Used = p.usage.Fuel.Load() - before
	return p.in.Result(), err
}

// SetNow sets the result of now_ns.
func (p *Probe) SetNow(nanoseconds uint64) { p.in.SetNow(nanoseconds) }

// FailText returns the guest's own description of the last failure.
func (p *Probe) FailText() string { return p.in.FailText() }

// MemoryBytes returns the size of the guest's memory; 0 after its end.
func (p *Probe) MemoryBytes() uint64 {
	if p.in.Dead() != nil {
		return 0
	}
	return p.in.MemorySize()
}

func (p *Probe) Close() { p.in.Close() }
