package policy

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// ProbeOptions say what guest a [Probe] starts.
type ProbeOptions struct {
	Role          abi.Role
	MaxSlots      uint32
	MaxNamespaces uint32 // 0 for 1,024
	Capacity      uint64
	Seed          uint64
	Config        Config
	Longer        uint32 // bytes by which every record is longer than this version has it, a multiple of 8
	Bare          bool   // _initialize is called and kv_init is not
}

// Probe is one guest that is driven by hand, export by export, under the fuel that a host would give each call. It is for
// programs that judge modules: unlike a role, it hands out raw results and lets its user write any bytes.
type Probe struct {
	in       *instance
	meter    meter
	settings settings

	// Used and Allowed are the fuel of the last call.
	Used, Allowed uint64
}

// Probe starts a guest of a module that is not native.
func (m *Module) Probe(ctx context.Context, o ProbeOptions) (*Probe, error) {
	p := &Probe{settings: settings{
		role: o.Role, maxSlots: o.MaxSlots, capacity: o.Capacity, seed: o.Seed, config: o.Config, namespaces: o.MaxNamespaces,
		longer: o.Longer, bare: o.Bare,
	}}
	if m.code == nil {
		return nil, fmt.Errorf("%w: %s is native", ErrBadModule, m.name)
	}
	if err := m.prepare(&p.settings); err != nil {
		return nil, err
	}
	var err error
	p.in, err = m.instantiate(ctx, &p.settings, &p.meter)
	p.Used, p.Allowed = p.meter.fuel.Load(), setupFuel+slotSetupFuel*uint64(o.MaxSlots)
	return p, err
}

// Limits are what the guest was told it would be asked for at most.
func (p *Probe) Limits() (batch, victims, namespaces, roots int) {
	return int(p.in.m.code.fuel.records()), maxVictims, int(p.settings.namespaces), maxRoots
}

// Room asks for a buffer, as often as one likes. An optional one may be refused: ok is then false.
func (p *Probe) Room(kind int, size uint32) (ok bool, err error) {
	before := p.meter.fuel.Load()
	err = p.in.offer(kind, size)
	p.Used, p.Allowed = p.meter.fuel.Load()-before, setupFuel
	return err == nil && p.in.bufs[kind].ptr != 0 && p.in.bufs[kind].size >= size, err
}

// Bytes is the beginning of a buffer, to be read and written until the next call.
func (p *Probe) Bytes(kind int, n uint32) ([]byte, error) { return p.in.view(kind, n) }

// Call calls an export with the fuel for so many records: those of a batch, the pages of a layout, the bytes of a text or
// of a state. It gives the raw result; an error is a trap, or fuel that ran out, and the guest's end.
func (p *Probe) Call(name string, a, b uint64, records int) (uint64, error) {
	f := p.in.export(name)
	if f.fn == nil {
		return 0, fmt.Errorf("%w: %s does not export %s", ErrBadModule, p.in.m.name, name)
	}
	p.Allowed = p.budget(name, records)
	before := p.meter.fuel.Load()
	err := p.in.call(&f, a, b, records, p.Allowed)
	p.Used = p.meter.fuel.Load() - before
	return p.in.stack[0], err
}

func (p *Probe) budget(name string, records int) uint64 {
	fuel := &p.in.m.code.fuel
	switch name {
	case abi.ExportStep:
		return fuel.of(records + maxVictims)
	case abi.ExportEvents, abi.ExportAdmit, abi.ExportPlace, abi.ExportUnplace:
		return fuel.of(records)
	case abi.ExportLayout:
		return fuel.most + pageFuel*uint64(records)
	case abi.ExportNamespace:
		return maxFuel + textFuel*uint64(records)
	case abi.ExportSave, abi.ExportLoad:
		return stateFuel(uint32(records), p.settings.maxSlots)
	}
	return setupFuel + slotSetupFuel*uint64(p.settings.maxSlots)
}

// Now is what now_ns answers from here on.
func (p *Probe) Now(nanoseconds uint64) { p.in.now = nanoseconds }

// Said are the guest's words for the last failure.
func (p *Probe) Said() string { return string(p.in.said) }

// MemoryBytes is the size of the guest's memory; 0 after its end.
func (p *Probe) MemoryBytes() uint64 {
	if p.in.dead != nil {
		return 0
	}
	return uint64(p.in.mem.Size())
}

// Close ends the guest.
func (p *Probe) Close() { p.in.close() }
