package policy

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// nativePlacer is a Go guest.
type nativePlacer struct {
	m         *Module
	usage     *sandbox.Usage
	guest     guest.Placer
	announced int
	roots     []abi.RootFacts
}

func newNativePlacer(m *Module, s *settings, t *sandbox.Usage) (placer, error) {
	g, err := native[guest.Placer](m, s)
	if err != nil {
		return nil, err
	}
	return &nativePlacer{m: m, usage: t, guest: g}, nil
}

func (p *nativePlacer) update(known []namespace, roots []abi.RootFacts, _ uint64) (int, error) {
	p.roots = roots
	if n, ok := p.guest.(guest.Namespacer); ok {
		for _, ns := range known[p.announced:] {
			n.Namespace(ns.id, ns.text)
		}
	}
	p.announced = len(known)
	return p.announced, nil
}

func (p *nativePlacer) path(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, bool, error) {
	start := p.usage.Begin(1)
	out, root := p.guest.Place(q, p.roots, dst)
	p.usage.End(start)
	if err := p.judge(root); err != nil {
		return dst, root, false, err
	}
	return out, root, true, nil
}

func (p *nativePlacer) paths(queries []abi.PlaceQuery, out *PathList) (bool, error) {
	start := p.usage.Begin(len(queries))
	first := len(out.roots)
	for i := range queries {
		var root uint32
		out.text, root = p.guest.Place(&queries[i], p.roots, out.text)
		out.ended(root)
	}
	p.usage.End(start)
	for i, root := range out.roots[first:] {
		if err := p.judge(root); err != nil {
			out.truncate(first + i)
			return false, err
		}
	}
	return true, nil
}

func (p *nativePlacer) judge(root uint32) error {
	if root != abi.None && uint64(root) >= uint64(len(p.roots)) {
		return p.fault(abi.ExportPlace, fmt.Sprintf("chose root %d of %d", root, len(p.roots)))
	}
	return nil
}

func (p *nativePlacer) batch() int { return MaxPaths }

func (p *nativePlacer) identity(path []byte) (abi.PathIdentity, bool, error) {
	start := p.usage.Begin(1)
	id := p.guest.Unplace(path)
	p.usage.End(start)
	return id, true, nil
}

func (p *nativePlacer) fault(export, reason string) error {
	p.usage.Faults.Add(1)
	return &Fault{Module: p.m.name, Export: export, Reason: reason}
}

func (p *nativePlacer) dead() error { return nil }
func (p *nativePlacer) close()      {}

// guestPlacer is a wasm guest.
type guestPlacer struct {
	m         *Module
	in        *sandbox.Instance
	place     sandbox.Export
	unplace   sandbox.Export
	announced int
	round     uint64
	roots     uint32
	most      int // queries of one crossing
}

const (
	answerBytes = abi.PlaceAnswerSize + maxPathBytes
	// MaxPaths is how many paths are requested in one call, if the guest has a RESULT of 16 KiB.
	MaxPaths = 15
)

func newGuestPlacer(ctx context.Context, m *Module, s *settings, t *sandbox.Usage) (placer, error) {
	in, err := m.instantiate(ctx, s, t)
	if err != nil {
		return nil, err
	}
	p := &guestPlacer{m: m, in: in, round: ^uint64(0), place: in.Export(abi.ExportPlace),
		unplace: in.Export(abi.ExportUnplace)}
	err = p.requestBuffers()
	if err == nil {
		err = in.OfferBuffer(abi.BufferRoots, abi.RootsHeaderSize+maxRoots*abi.RootFactsSize)
	}
	if err != nil {
		in.Close()
		return nil, err
	}
	return p, nil
}

// requestBuffers requests buffers for a batch or, if the guest refuses them, for one query and one answer.
func (p *guestPlacer) requestBuffers() error {
	const args = abi.PathRefSize + maxPathBytes
	if err := p.in.OfferBuffer(abi.BufferResult, MaxPaths*answerBytes); err != nil {
		return err
	}
	if p.most = MaxPaths; !p.in.HasBuffer(abi.BufferResult, 1) {
		p.most = 1
		if err := p.in.RequireBuffer(abi.BufferResult, answerBytes); err != nil {
			return err
		}
	}
	return p.in.RequireBuffer(abi.BufferArgs, max(args, uint32(p.most)*abi.PlaceQuerySize))
}

func (p *guestPlacer) update(known []namespace, roots []abi.RootFacts, round uint64) (told int, err error) {
	for ; p.announced < len(known); p.announced++ {
		n := &known[p.announced]
		if n.refused.Load() != nil {
			continue
		}
		if err := p.in.Namespace(n.id, n.text); err != nil {
			return p.announced, err
		}
	}
	if p.round == round {
		return p.announced, nil
	}
	p.round, p.roots = round, uint32(len(roots))
	return p.announced, p.writeRoots(roots)
}

func (p *guestPlacer) writeRoots(roots []abi.RootFacts) error {
	if !p.in.HasBuffer(abi.BufferRoots, 1) {
		return nil
	}
	b, err := p.in.View(abi.BufferRoots, abi.RootsHeaderSize+p.roots*abi.RootFactsSize)
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
	result, ok, err := p.ask(unsafe.Slice(q, 1))
	if err != nil || !ok {
		return dst, abi.None, false, err
	}
	path, root, err := p.answer(result, 0)
	if err != nil {
		return dst, abi.None, false, err
	}
	return append(dst, path...), root, true, nil
}

func (p *guestPlacer) paths(queries []abi.PlaceQuery, out *PathList) (bool, error) {
	result, ok, err := p.ask(queries)
	if err != nil || !ok {
		return false, err
	}
	for i := range queries {
		path, root, err := p.answer(result, i)
		if err != nil {
			return false, err
		}
		out.text = append(out.text, path...)
		out.ended(root)
	}
	return true, nil
}

func (p *guestPlacer) batch() int { return p.most }

// ask calls the guest once, with at most a batch of queries.
func (p *guestPlacer) ask(queries []abi.PlaceQuery) (result []byte, ok bool, err error) {
	n := len(queries)
	args, err := sandbox.Records[abi.PlaceQuery](p.in, abi.BufferArgs, uint32(n))
	if err != nil {
		return nil, false, err
	}
	copy(args, queries)
	got, ok, err := p.in.Count(&p.place, uint64(n), abi.PlaceQuerySize, n, p.m.code.Limits().For(n))
	if err != nil || !ok {
		return nil, false, err
	}
	if got != uint32(n) {
		return nil, false, p.in.Fault(p.place.Name, fmt.Sprintf("gave %d answers to %d %s", got, n,
			plural(n, "query", "queries")), nil)
	}
	result, err = p.in.View(abi.BufferResult, p.in.BufferSize(abi.BufferResult))
	return result, err == nil, err
}

// answer is the i-th answer in RESULT. The caller checks the path.
func (p *guestPlacer) answer(result []byte, i int) (path []byte, root uint32, err error) {
	a := (*abi.PlaceAnswer)(unsafe.Pointer(&result[i*abi.PlaceAnswerSize]))
	if uint64(a.Off)+uint64(a.Len) > uint64(len(result)) {
		return nil, abi.None, p.in.Fault(p.place.Name, fmt.Sprintf("gave a path of %d bytes at %d, outside its buffer", a.Len,
			a.Off), nil)
	}
	if a.Root != abi.None && a.Root >= p.roots {
		return nil, abi.None, p.in.Fault(p.place.Name, fmt.Sprintf("chose root %d of %d", a.Root, p.roots), nil)
	}
	return result[a.Off : a.Off+a.Len], a.Root, nil
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

func (p *guestPlacer) identity(path []byte) (abi.PathIdentity, bool, error) {
	b, err := p.in.View(abi.BufferArgs, uint32(abi.PathRefSize+len(path)))
	if err != nil {
		return abi.PathIdentity{}, false, err
	}
	*(*abi.PathRef)(unsafe.Pointer(&b[0])) = abi.PathRef{Off: abi.PathRefSize, Len: uint32(len(path))}
	copy(b[abi.PathRefSize:], path)
	n, ok, err := p.in.Count(&p.unplace, 1, abi.PathRefSize, 1, p.m.code.Limits().For(1))
	if err != nil || !ok {
		return abi.PathIdentity{}, false, err
	}
	if n != 1 {
		return abi.PathIdentity{}, false, p.in.Fault(p.unplace.Name, fmt.Sprintf("gave %d answers to 1 path", n), nil)
	}
	answers, err := sandbox.Records[abi.PathIdentity](p.in, abi.BufferResult, 1)
	if err != nil {
		return abi.PathIdentity{}, false, err
	}
	return answers[0], true, nil
}

func (p *guestPlacer) fault(export, reason string) error { return p.in.Fault(export, reason, nil) }
func (p *guestPlacer) dead() error                       { return p.in.Dead() }
func (p *guestPlacer) close()                            { p.in.Close() }
