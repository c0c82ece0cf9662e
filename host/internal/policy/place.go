package policy

import (
	"context"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

type PlaceOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // namespace ids are below this; 0: 1,024
	Observe       Observer
}

// maxRoots bounds the roots that a policy gets facts about.
const maxRoots = 64

// Place names new pieces. It is asked once for each piece, and its answers may differ for equal questions, since names
// are written down. It is safe for concurrent use; calls are serialised. While a module is down after a fault, and once
// it is in quarantine, new pieces get the built-in names.
type Place struct {
	role[guest.Placer]
	observe Observer
	roots   []abi.RootFacts
	told    *sandbox.Instance // the instance that has the present facts
}

const answerBytes = abi.PlaceAnswerSize + MaxPath

// NewPlace starts the role, so that a module that cannot start fails here.
func (m *Module) NewPlace(ctx context.Context, o PlaceOptions) (*Place, error) {
	p := &Place{role: role[guest.Placer]{m: m, export: abi.ExportPlace, buffers: map[int]uint32{
		abi.BufferResult: answerBytes, abi.BufferArgs: abi.PlaceQuerySize,
		abi.BufferRoots: abi.RootsHeaderSize + maxRoots*abi.RootFactsSize,
	}}, observe: o.Observe}
	s := &p.settings
	s.role, s.config, s.Seed, s.MaxNamespaces = abi.RolePlace, o.Config, o.Seed, o.MaxNamespaces
	if err := p.begin(ctx); err != nil {
		return nil, err
	}
	return p, nil
}

// SetRoots gives the policy current facts about the roots, at most 64. A path's root is an index into them.
func (p *Place) SetRoots(roots []abi.RootFacts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roots, p.told = slices.Clone(roots[:min(len(roots), maxRoots)]), nil
}

// Path appends a new piece's path below its root to dst. It appends nothing if the piece gets the built-in name, as
// after every error. root is an index into the facts of SetRoots, or [abi.None] if the policy leaves the choice to the
// host.
func (p *Place) Path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil || !p.native && p.in == nil {
		return dst, abi.None, p.err
	}
	if p.observe != nil && p.in != nil {
		c := &Call{Query: q, Roots: p.roots, Allowed: p.m.code.Limits().For(1)}
		p.err = p.observe.watch(c, p.Stats, func() (err error) {
			path, root, err = p.answer(q, dst)
			c.Path, c.Root = path[len(dst):], root
			return err
		})
		return path, root, p.err
	}
	path, root, err = p.answer(q, dst)
	if err != nil && !p.native { // a native guest is kept
		_ = p.failed(err)
	}
	return path, root, err
}

// answer returns the guest's answer, or an error if the answer breaks the contract.
func (p *Place) answer(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, err error) {
	out, root, left, err := p.ask(q, dst)
	if err != nil || left {
		return dst, abi.None, err
	}
	reason := pathError(out[len(dst):])
	if root != abi.None && uint64(root) >= uint64(len(p.roots)) {
		reason = fmt.Sprintf("chose root %d of %d", root, len(p.roots))
	}
	if reason != "" {
		return dst, abi.None, p.fault(reason, nil)
	}
	return out, root, nil
}

// Misnamed records a name that a piece cannot have, because another file has it or one of its directories. It counts as
// a fault.
func (p *Place) Misnamed(cause error) {
	p.usage.Faults.Add(1)
	if p.m.code == nil {
		return
	}
	verdict, _ := p.m.Failed(abi.RolePlace, cause)
	p.mu.Lock()
	defer p.mu.Unlock()
	if verdict == Halt && p.err == nil {
		p.err = cause
	}
	if verdict != Restart && p.in != nil {
		p.drop()
	}
}

// tellRoots writes the facts into the guest's buffer. A guest that does not choose roots has no buffer for them.
func (p *Place) tellRoots() error {
	p.told = p.in
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

// ask appends the guest's path. left is true if the guest leaves the answer to the host.
func (p *Place) ask(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, left bool, err error) {
	if p.native {
		start := p.usage.Begin(1)
		out, root := p.guest.Place(q, p.roots, dst)
		p.usage.End(start)
		return out, root, false, nil
	}
	if p.told != p.in {
		if err := p.tellRoots(); err != nil {
			return dst, abi.None, false, err
		}
	}
	args, err := sandbox.Records[abi.PlaceQuery](p.in, abi.BufferArgs, 1)
	if err != nil {
		return dst, abi.None, false, err
	}
	args[0] = *q
	got, ok, err := p.in.Count(&p.call, 1, abi.PlaceQuerySize, 1, p.m.code.Limits().For(1))
	if err != nil || !ok {
		return dst, abi.None, true, err
	}
	if got != 1 {
		return dst, abi.None, false, p.fault(fmt.Sprintf("gave %d answers to 1 query", got), nil)
	}
	result, err := p.in.View(abi.BufferResult, p.in.BufferSize(abi.BufferResult))
	if err != nil {
		return dst, abi.None, false, err
	}
	a := (*abi.PlaceAnswer)(unsafe.Pointer(&result[0]))
	if uint64(a.Off)+uint64(a.Len) > uint64(len(result)) {
		return dst, abi.None, false, p.fault(fmt.Sprintf("gave a path of %d bytes at %d, outside its buffer", a.Len, a.Off), nil)
	}
	return append(dst, result[a.Off:a.Off+a.Len]...), a.Root, false, nil
}
