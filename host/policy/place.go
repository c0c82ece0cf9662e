package policy

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// PlaceOptions bind a place policy.
type PlaceOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
}

// Place names files. It is safe for concurrent use.
type Place struct {
	m     *Module
	meter meter
	mu    sync.Mutex
	limit uint32
	roots []abi.RootFacts
	guest guest.Placer
	err   error
}

// NewPlace makes the role.
func (m *Module) NewPlace(ctx context.Context, o PlaceOptions) (*Place, error) {
	s := settings{role: abi.RolePlace, seed: o.Seed, config: o.Config, namespaces: o.MaxNamespaces}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	g, err := native[guest.Placer](m, &s)
	if err != nil {
		return nil, err
	}
	return &Place{m: m, guest: g, limit: s.namespaces}, nil
}

// Namespace tells the policy a namespace's text, before any query that names its id.
func (p *Place) Namespace(id uint32, text string) error {
	if err := checkNamespace(p.m, id, p.limit, text); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err
	}
	if n, ok := p.guest.(guest.Namespacer); ok {
		n.Namespace(id, text)
	}
	return nil
}

// SetRoots gives the policy fresh facts about the roots; a path's root is an index into them.
func (p *Place) SetRoots(roots []abi.RootFacts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roots = slices.Clone(roots)
}

// Path appends one piece's relative path to dst. The root is an index into the facts given to SetRoots, or [abi.None]
// when the choice is the host's.
func (p *Place) Path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return dst, abi.None, p.err
	}
	start := time.Now()
	out, root := p.guest.Place(q, p.roots, dst)
	p.meter.add(start, 1)
	if err := p.judge(out[len(dst):], root, len(p.roots)); err != nil {
		return dst, abi.None, err
	}
	return out, root, nil
}

// Identity reads a path back. Known is 0 when Path would not give this path for what it names.
func (p *Place) Identity(path []byte) (abi.PathIdentity, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return abi.PathIdentity{}, p.err
	}
	start := time.Now()
	id := p.guest.Unplace(path)
	p.meter.add(start, 1)
	return id, nil
}

func (p *Place) judge(path []byte, root uint32, roots int) error {
	if root != abi.None && uint64(root) >= uint64(roots) {
		return p.fault(abi.ExportPlace, fmt.Sprintf("chose root %d of %d", root, roots))
	}
	if what := pathError(path); what != "" {
		return p.fault(abi.ExportPlace, what)
	}
	return nil
}

func (p *Place) fault(export, reason string) error {
	p.meter.faults.Add(1)
	return &Fault{Module: p.m.name, Export: export, Reason: reason}
}

// Close ends the policy.
func (p *Place) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = ErrClosed
	return nil
}

// Stats may be called at any time.
func (p *Place) Stats() Stats { return p.meter.stats(p.m, abi.RolePlace) }
