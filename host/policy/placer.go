package policy

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// nativePlacer is a Go guest.
type nativePlacer struct {
	m     *Module
	meter *meter
	guest guest.Placer
	told  int
	roots []abi.RootFacts
}

func newNativePlacer(m *Module, s *settings, t *meter) (placer, error) {
	g, err := native[guest.Placer](m, s)
	if err != nil {
		return nil, err
	}
	return &nativePlacer{m: m, meter: t, guest: g}, nil
}

func (p *nativePlacer) catchUp(known []namespace, roots []abi.RootFacts, _ uint64) error {
	p.roots = roots
	if n, ok := p.guest.(guest.Namespacer); ok {
		for _, ns := range known[p.told:] {
			n.Namespace(ns.id, ns.text)
		}
	}
	p.told = len(known)
	return nil
}

func (p *nativePlacer) path(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, bool, error) {
	start := p.meter.begin(1)
	out, root := p.guest.Place(q, p.roots, dst)
	p.meter.done(start)
	if root != abi.None && uint64(root) >= uint64(len(p.roots)) {
		return dst, root, false, p.fault(abi.ExportPlace, fmt.Sprintf("chose root %d of %d", root, len(p.roots)))
	}
	return out, root, true, nil
}

func (p *nativePlacer) identity(path []byte) (abi.PathIdentity, bool, error) {
	start := p.meter.begin(1)
	id := p.guest.Unplace(path)
	p.meter.done(start)
	return id, true, nil
}

func (p *nativePlacer) fault(export, reason string) error {
	p.meter.faults.Add(1)
	return &Fault{Module: p.m.name, Export: export, Reason: reason}
}

func (p *nativePlacer) dead() error { return nil }
func (p *nativePlacer) close()      {}

// guestPlacer is a wasm guest.
type guestPlacer struct {
	in      *instance
	place   export
	unplace export
	told    int
	round   uint64
	roots   uint32
}

const placeRoom = abi.PlaceAnswerSize + maxPathBytes

func newGuestPlacer(ctx context.Context, m *Module, s *settings, t *meter) (placer, error) {
	in, err := m.instantiate(ctx, s, t)
	if err != nil {
		return nil, err
	}
	p := &guestPlacer{in: in, round: ^uint64(0), place: in.export(abi.ExportPlace), unplace: in.export(abi.ExportUnplace)}
	err = in.buffer(abi.BufferArgs, abi.PathRefSize+maxPathBytes)
	if err == nil {
		err = in.buffer(abi.BufferResult, placeRoom)
	}
	if err == nil {
		err = in.offer(abi.BufferRoots, abi.RootsHeaderSize+maxRoots*abi.RootFactsSize)
	}
	if err != nil {
		in.close()
		return nil, err
	}
	return p, nil
}

func (p *guestPlacer) catchUp(known []namespace, roots []abi.RootFacts, round uint64) error {
	for ; p.told < len(known); p.told++ {
		if err := p.in.namespace(known[p.told].id, known[p.told].text); err != nil {
			return err
		}
	}
	if p.round == round {
		return nil
	}
	p.round, p.roots = round, uint32(len(roots))
	if p.in.bufs[abi.BufferRoots].ptr == 0 {
		return nil
	}
	b, err := p.in.view(abi.BufferRoots, abi.RootsHeaderSize+p.roots*abi.RootFactsSize)
	if err != nil {
		return err
	}
	*(*abi.RootsHeader)(unsafe.Pointer(&b[0])) = abi.RootsHeader{Count: p.roots, Stride: abi.RootFactsSize}
	if len(roots) > 0 {
		copy(unsafe.Slice((*abi.RootFacts)(unsafe.Pointer(&b[abi.RootsHeaderSize])), len(roots)), roots)
	}
	return nil
}

func (p *guestPlacer) path(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, bool, error) {
	none := func(err error) ([]byte, uint32, bool, error) { return dst, abi.None, false, err }
	args, err := records[abi.PlaceQuery](p.in, abi.BufferArgs, 1)
	if err != nil {
		return none(err)
	}
	args[0] = *q
	n, ok, err := p.in.count(&p.place, 1, abi.PlaceQuerySize, 1, p.in.m.code.fuel.of(1))
	if err != nil || !ok {
		return none(err)
	}
	if n != 1 {
		return none(p.in.fault(p.place.name, fmt.Sprintf("gave %d answers to 1 query", n), nil))
	}
	b, err := p.in.view(abi.BufferResult, placeRoom)
	if err != nil {
		return none(err)
	}
	a := (*abi.PlaceAnswer)(unsafe.Pointer(&b[0]))
	if uint64(a.Off)+uint64(a.Len) > uint64(len(b)) {
		return none(p.in.fault(p.place.name, fmt.Sprintf("gave a path of %d bytes at %d, outside its buffer", a.Len, a.Off), nil))
	}
	if a.Root != abi.None && a.Root >= p.roots {
		return none(p.in.fault(p.place.name, fmt.Sprintf("chose root %d of %d", a.Root, p.roots), nil))
	}
	return append(dst, b[a.Off:a.Off+a.Len]...), a.Root, true, nil
}

func (p *guestPlacer) identity(path []byte) (abi.PathIdentity, bool, error) {
	b, err := p.in.view(abi.BufferArgs, uint32(abi.PathRefSize+len(path)))
	if err != nil {
		return abi.PathIdentity{}, false, err
	}
	*(*abi.PathRef)(unsafe.Pointer(&b[0])) = abi.PathRef{Off: abi.PathRefSize, Len: uint32(len(path))}
	copy(b[abi.PathRefSize:], path)
	n, ok, err := p.in.count(&p.unplace, 1, abi.PathRefSize, 1, p.in.m.code.fuel.of(1))
	if err != nil || !ok {
		return abi.PathIdentity{}, false, err
	}
	if n != 1 {
		return abi.PathIdentity{}, false, p.in.fault(p.unplace.name, fmt.Sprintf("gave %d answers to 1 path", n), nil)
	}
	answers, err := records[abi.PathIdentity](p.in, abi.BufferResult, 1)
	if err != nil {
		return abi.PathIdentity{}, false, err
	}
	return answers[0], true, nil
}

func (p *guestPlacer) fault(export, reason string) error { return p.in.fault(export, reason, nil) }
func (p *guestPlacer) dead() error                       { return p.in.dead }
func (p *guestPlacer) close()                            { p.in.close() }
