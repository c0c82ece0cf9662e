package policy

import (
	"context"
	"fmt"
	"sync"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/layermajor"
)

// LayoutOptions bind a layout policy.
type LayoutOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
}

// Layout decides how a payload's page bytes are ordered. It is safe for concurrent use; calls are serialised. While a
// module is down after a fault, the built-in policy answers.
type Layout struct {
	m        *Module
	settings settings
	usage    sandbox.Usage
	restarts *restarter

	mu        sync.Mutex
	announced map[uint32]bool
	guest     guest.Layouter    // native
	in        *sandbox.Instance // wasm; nil while it is down
	call      sandbox.Export
	err       error
}

// NewLayout starts an instance.
func (m *Module) NewLayout(ctx context.Context, o LayoutOptions) (*Layout, error) {
	s := settings{role: abi.RoleLayout, config: o.Config}
	s.Seed, s.MaxNamespaces = o.Seed, o.MaxNamespaces
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	l := &Layout{m: m, settings: s, announced: map[uint32]bool{}, restarts: newRestarter(m, abi.RoleLayout)}
	var err error
	if m.code == nil {
		l.guest, err = native[guest.Layouter](m, &s)
		return l, err
	}
	if err = l.restart(ctx); err != nil {
		return nil, err
	}
	return l, nil
}

// restart starts an instance: the first one, or one that replaces a failed one. It gets a namespace when it is
// first asked about it.
func (l *Layout) restart(ctx context.Context) error {
	in, err := l.m.instantiate(ctx, &l.settings, &l.usage)
	if err != nil {
		return err
	}
	err = in.RequireBuffer(abi.BufferArgs, abi.LayoutHeaderSize+kv.MaxPlanes*abi.PlaneSize)
	if err == nil {
		err = in.RequireBuffer(abi.BufferResult, kv.MaxSegments*abi.SegmentSize)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || l.err != nil {
		in.Close()
		return err
	}
	l.in, l.call = in, in.Export(abi.ExportLayout)
	clear(l.announced)
	l.usage.Builtin.Store(false)
	return nil
}

// Plan asks for the layout of one namespace's group and checks that it covers every page byte exactly once.
func (l *Layout) Plan(nsID, group uint32, nsText string, g kv.Geometry) (*kv.Plan, error) {
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
	if l.guest != nil || l.in != nil {
		plan, err := l.plan(h, planes, nsText, g)
		if err == nil {
			return plan, nil
		}
		if l.in != nil {
			l.in.Close()
		}
		l.in, l.guest = nil, nil
		if l.restarts.failed(err, l.restart) == Halt {
			l.err = err
			return nil, err
		}
		l.usage.Builtin.Store(true)
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

// segments asks the guest, after telling it of the namespace.
func (l *Layout) segments(h abi.LayoutHeader, planes []abi.Plane, nsText string) ([]abi.Segment, error) {
	tell := !l.announced[h.Namespace]
	l.announced[h.Namespace] = true
	if l.in == nil {
		if n, ok := l.guest.(guest.Namespacer); ok && tell {
			n.Namespace(h.Namespace, nsText)
		}
		start := l.usage.Begin(len(planes))
		segments := l.guest.Layout(h, planes, nil)
		l.usage.End(start)
		return segments, nil
	}
	if tell {
		if err := l.in.Namespace(h.Namespace, nsText); err != nil {
			return nil, err
		}
	}
	args, err := l.in.View(abi.BufferArgs, uint32(abi.LayoutHeaderSize+len(planes)*abi.PlaneSize))
	if err != nil {
		return nil, err
	}
	*(*abi.LayoutHeader)(unsafe.Pointer(&args[0])) = h
	copy(unsafe.Slice((*abi.Plane)(unsafe.Pointer(&args[abi.LayoutHeaderSize])), len(planes)), planes)
	n, ok, err := l.in.Count(&l.call, uint64(len(planes)), abi.PlaneSize, len(planes),
		l.m.code.Limits().ForPages(uint64(len(planes))*uint64(h.Blocks)))
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

func (l *Layout) fault(reason string, cause error) error {
	if l.in != nil {
		return l.in.Fault(abi.ExportLayout, reason, cause)
	}
	l.usage.Faults.Add(1)
	return &Fault{Module: l.m.name, Export: abi.ExportLayout, Reason: reason, Cause: cause}
}

// Close ends the policy.
func (l *Layout) Close() error {
	l.mu.Lock()
	if l.in != nil {
		l.in.Close()
	}
	l.err = ErrClosed
	l.mu.Unlock()
	l.restarts.close()
	return nil
}

// Stats may be called at any time.
func (l *Layout) Stats() Stats { return stats(&l.usage, l.m, abi.RoleLayout) }
