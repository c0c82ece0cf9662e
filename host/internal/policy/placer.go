package policy

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// nativePlacer is a Go guest.
type nativePlacer struct {
	m     *Module
	usage *sandbox.Usage
	guest guest.Placer
	roots []abi.RootFacts
}

func newNativePlacer(m *Module, s *settings, t *sandbox.Usage) (placer, error) {
	g, err := native[guest.Placer](m, s)
	if err != nil {
		return nil, err
	}
	return &nativePlacer{m: m, usage: t, guest: g}, nil
}

func (p *nativePlacer) namespace(id uint32, text string) error {
	if n, ok := p.guest.(guest.Namespacer); ok {
		n.Namespace(id, text)
	}
	return nil
}

func (p *nativePlacer) setRoots(roots []abi.RootFacts) { p.roots = roots }

func (p *nativePlacer) path(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, bool, error) {
	start := p.usage.Begin(1)
	out, root := p.guest.Place(q, p.roots, dst)
	p.usage.End(start)
	return out, root, true, nil
}

func (p *nativePlacer) fault(reason string) error {
	p.usage.Faults.Add(1)
	return &Fault{Module: p.m.name, Export: abi.ExportPlace, Reason: reason}
}

func (p *nativePlacer) dead() error { return nil }
func (p *nativePlacer) close()      {}

// guestPlacer is a wasm guest.
type guestPlacer struct {
	m     *Module
	in    *sandbox.Instance
	place sandbox.Export
	roots []abi.RootFacts
	told  bool // of the roots
}

const answerBytes = abi.PlaceAnswerSize + MaxPath

func newGuestPlacer(ctx context.Context, m *Module, s *settings, t *sandbox.Usage) (placer, error) {
	in, err := m.instantiate(ctx, s, t)
	if err != nil {
		return nil, err
	}
	p := &guestPlacer{m: m, in: in, place: in.Export(abi.ExportPlace)}
	err = in.RequireBuffer(abi.BufferResult, answerBytes)
	if err == nil {
		err = in.RequireBuffer(abi.BufferArgs, abi.PlaceQuerySize)
	}
	if err == nil {
		err = in.OfferBuffer(abi.BufferRoots, abi.RootsHeaderSize+maxRoots*abi.RootFactsSize)
	}
	if err != nil {
		in.Close()
		return nil, err
	}
	return p, nil
}

func (p *guestPlacer) namespace(id uint32, text string) error { return p.in.Namespace(id, text) }

func (p *guestPlacer) setRoots(roots []abi.RootFacts) { p.roots, p.told = roots, false }

// tellRoots writes the facts into the guest's buffer, if it has one: a guest that does not choose roots needs none.
func (p *guestPlacer) tellRoots() error {
	p.told = true
	if !p.in.HasBuffer(abi.BufferRoots, 1) {
		return nil
	}
	n := uint32(len(p.roots))
	b, err := p.in.View(abi.BufferRoots, abi.RootsHeaderSize+n*abi.RootFactsSize)
	if err != nil {
		return err
	}
	*(*abi.RootsHeader)(unsafe.Pointer(&b[0])) = abi.RootsHeader{Count: n, Stride: abi.RootFactsSize}
	if n > 0 {
		copy(unsafe.Slice((*abi.RootFacts)(unsafe.Pointer(&b[abi.RootsHeaderSize])), n), p.roots)
	}
	return nil
}

func (p *guestPlacer) path(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, bool, error) {
	if !p.told {
		if err := p.tellRoots(); err != nil {
			return dst, abi.None, false, err
		}
	}
	args, err := sandbox.Records[abi.PlaceQuery](p.in, abi.BufferArgs, 1)
	if err != nil {
		return dst, abi.None, false, err
	}
	args[0] = *q
	got, ok, err := p.in.Count(&p.place, 1, abi.PlaceQuerySize, 1, p.m.code.Limits().For(1))
	if err != nil || !ok {
		return dst, abi.None, false, err
	}
	if got != 1 {
		return dst, abi.None, false, p.fault(fmt.Sprintf("gave %d answers to 1 query", got))
	}
	result, err := p.in.View(abi.BufferResult, p.in.BufferSize(abi.BufferResult))
	if err != nil {
		return dst, abi.None, false, err
	}
	a := (*abi.PlaceAnswer)(unsafe.Pointer(&result[0]))
	if uint64(a.Off)+uint64(a.Len) > uint64(len(result)) {
		return dst, abi.None, false, p.fault(fmt.Sprintf("gave a path of %d bytes at %d, outside its buffer", a.Len, a.Off))
	}
	return append(dst, result[a.Off:a.Off+a.Len]...), a.Root, true, nil
}

func (p *guestPlacer) fault(reason string) error { return p.in.Fault(p.place.Name, reason, nil) }
func (p *guestPlacer) dead() error               { return p.in.Dead() }
func (p *guestPlacer) close()                    { p.in.Close() }
