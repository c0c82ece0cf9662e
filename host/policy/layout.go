package policy

import (
	"context"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/chunk"
)

// LayoutOptions bind a layout policy.
type LayoutOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
}

// Layout decides how a payload's page bytes are ordered. It is safe for concurrent use; calls take turns.
type Layout struct {
	m     *Module
	meter meter
	mu    sync.Mutex
	limit uint32
	told  map[uint32]bool
	guest guest.Layouter
	err   error
}

// NewLayout makes an instance.
func (m *Module) NewLayout(ctx context.Context, o LayoutOptions) (*Layout, error) {
	s := settings{role: abi.RoleLayout, seed: o.Seed, config: o.Config, namespaces: o.MaxNamespaces}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	g, err := native[guest.Layouter](m, &s)
	if err != nil {
		return nil, err
	}
	return &Layout{m: m, guest: g, limit: s.namespaces, told: map[uint32]bool{}}, nil
}

// Plan asks for the layout of one namespace's group and checks that it covers every page byte exactly once.
func (l *Layout) Plan(nsID, group uint32, nsText string, g chunk.Geometry) (*chunk.Plan, error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	if err := checkNamespace(l.m, nsID, l.limit, nsText); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	if n, ok := l.guest.(guest.Namespacer); ok && !l.told[nsID] {
		n.Namespace(nsID, nsText)
	}
	l.told[nsID] = true
	planes := make([]abi.Plane, len(g.Planes))
	for i, p := range g.Planes {
		planes[i] = abi.Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes}
	}
	h := abi.LayoutHeader{Namespace: nsID, Group: group, Blocks: g.Blocks, Planes: uint32(len(planes))}
	start := time.Now()
	segments := l.guest.Layout(h, planes, nil)
	l.meter.add(start, len(planes))
	plan, err := chunk.NewPlan(g, segments)
	if err != nil {
		l.meter.faults.Add(1)
		l.err = &Fault{Module: l.m.name, Export: abi.ExportLayout, Reason: err.Error(), Cause: err}
		return nil, l.err
	}
	return plan, nil
}

// Close ends the policy.
func (l *Layout) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = ErrClosed
	return nil
}

// Stats may be called at any time.
func (l *Layout) Stats() Stats { return l.meter.stats(l.m, abi.RoleLayout) }
