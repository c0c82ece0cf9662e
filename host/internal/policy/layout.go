package policy

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/layermajor"
)

type LayoutOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // namespace ids are below this; 0: 1,024
}

// Layout decides about the order of a payload's page bytes. It is safe for concurrent use; calls are serialised. While
// a module is down after a fault, the built-in policy answers.
type Layout struct {
	role[guest.Layouter]
}

func (m *Module) NewLayout(ctx context.Context, o LayoutOptions) (*Layout, error) {
	l := &Layout{role: role[guest.Layouter]{m: m, export: abi.ExportLayout, buffers: map[int]uint32{
		abi.BufferArgs: abi.LayoutHeaderSize + kv.MaxPlanes*abi.PlaneSize, abi.BufferResult: kv.MaxSegments * abi.SegmentSize,
	}}}
	s := &l.settings
	s.role, s.config, s.Seed, s.MaxNamespaces = abi.RoleLayout, o.Config, o.Seed, o.MaxNamespaces
	if err := l.begin(ctx); err != nil {
		return nil, err
	}
	return l, nil
}

// Plan asks for the layout of one namespace's group and checks that it covers every page byte exactly once.
func (l *Layout) Plan(nsID, group uint32, nsText string, g kv.Geometry) (plan *kv.Plan, err error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	if err := checkNamespace(l.m, nsID, l.settings.MaxNamespaces, nsText); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	planes := make([]abi.Plane, len(g.Planes))
	for i, p := range g.Planes {
		planes[i] = abi.Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes}
	}
	h := abi.LayoutHeader{Namespace: nsID, Group: group, Blocks: g.Blocks, Planes: uint32(len(planes))}
	if l.native || l.in != nil {
		plan, err := l.plan(h, planes, nsText, g)
		if err == nil {
			return plan, nil
		}
		if err := l.failed(err); err != nil {
			return nil, err
		}
	}
	return kv.NewPlan(g, (*layermajor.Policy)(nil).Layout(h, planes, nil))
}

func (l *Layout) plan(h abi.LayoutHeader, planes []abi.Plane, nsText string, g kv.Geometry) (*kv.Plan, error) {
	segments, err := l.segments(h, planes, nsText)
	if err != nil {
		return nil, err
	}
	plan, err := kv.NewPlan(g, segments)
	if err != nil {
		return nil, l.fault(err.Error(), err)
	}
	return plan, nil
}

// fuel returns the fuel of an answer.
func (l *Layout) fuel(h *abi.LayoutHeader) uint64 {
	return l.m.code.Limits().ForPages(uint64(h.Planes) * uint64(h.Blocks))
}

// segments asks the guest, after it has passed the namespace's text.
func (l *Layout) segments(h abi.LayoutHeader, planes []abi.Plane, nsText string) ([]abi.Segment, error) {
	if err := l.announce(h.Namespace, nsText); err != nil {
		return nil, err
	}
	if l.native {
		start := l.usage.Begin(len(planes))
		segments := l.guest.Layout(h, planes, nil)
		l.usage.End(start)
		return segments, nil
	}
	args, err := l.in.View(abi.BufferArgs, uint32(abi.LayoutHeaderSize+len(planes)*abi.PlaneSize))
	if err != nil {
		return nil, err
	}
	*(*abi.LayoutHeader)(unsafe.Pointer(&args[0])) = h
	copy(unsafe.Slice((*abi.Plane)(unsafe.Pointer(&args[abi.LayoutHeaderSize])), len(planes)), planes)
	n, ok, err := l.in.Count(&l.call, uint64(len(planes)), abi.PlaneSize, len(planes), l.fuel(&h))
	if err != nil {
		return nil, err
	}
	if !ok {
		return (*layermajor.Policy)(nil).Layout(h, planes, nil), nil
	}
	if n > kv.MaxSegments {
		return nil, l.fault(fmt.Sprintf("gave %d segments, at most %d", n, kv.MaxSegments), nil)
	}
	return sandbox.Records[abi.Segment](l.in, abi.BufferResult, n) // NewPlan copies them before the next call
}
