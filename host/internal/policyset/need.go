package policyset

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Needs is the memory that the roots need when they are full, with the policies with which they started.
func (p *Set) Needs(ctx context.Context) (needs []doctor.Need, err error) {
	evicts, err := p.startEvicts(ctx)
	if err != nil {
		return nil, err
	}
	measured := map[*policy.Module]footprint{}
	for i, h := range evicts {
		root := &p.start.cfg.Roots[i]
		o := policy.EvictOptions{MaxSlots: store.SlotsFor(root.Capacity), Config: h.Config}
		f, ok := measured[h.Module]
		if !ok && err == nil {
			if f, err = footprintOf(ctx, h.Module, o); err != nil {
				err = fmt.Errorf("%w: the memory of %s cannot be measured: %w", ErrPolicy, h.Label, err)
			}
			measured[h.Module] = f
		}
		needs = append(needs, doctor.Need{
			Root: root.Path, Entries: o.MaxSlots, IndexBytes: uint64(o.MaxSlots) * doctor.IndexEntry,
			Policy: h.Label, PolicyBytes: f.For(o.MaxSlots), PolicyFits: f.Fits(o.MaxSlots),
		})
	}
	for _, h := range evicts {
		h.Release()
	}
	return needs, err
}

// startEvicts are references to the policies with which the roots started, one for each root.
func (p *Set) startEvicts(ctx context.Context) (evicts []*policy.Handle, err error) {
	err = p.locked(ctx, func() error {
		for _, h := range p.start.Roots {
			if h == nil {
				h = p.start.Policies.Evict
			}
			switch {
			case h == nil:
				evicts = append(evicts, policy.BuiltinHandle(abi.RoleEvict))
			case p.active[h.Label] != h:
				return errChanged
			default:
				evicts = append(evicts, h.Acquire())
			}
		}
		return nil
	})
	if err != nil {
		for _, h := range evicts {
			h.Release()
		}
		return nil, err
	}
	return evicts, nil
}

// LogNeeds logs what memory the roots need when they are full. It is for the start of a host: it measures the policies
// that the host began with, in instances of their own. Close waits for it.
func (p *Set) LogNeeds(ctx context.Context) {
	p.openMu.Lock()
	if p.over {
		p.openMu.Unlock()
		return
	}
	p.inUse.Add(1)
	p.openMu.Unlock()
	defer p.inUse.Done()
	needs, err := p.Needs(ctx)
	if err != nil {
		if ctx.Err() == nil && err != errChanged {
			p.log.Warn("the memory of full roots is unknown", "error", err)
		}
		return
	}
	var r doctor.Report
	r.Needs(needs, p.memory.Limit())
	for _, n := range needs {
		p.log.Info("memory when full", "root", n.Root, "entries", n.Entries, "index", config.SizeText(int64(n.IndexBytes)),
			"policy", n.Policy, "policy_memory", config.SizeText(int64(n.PolicyBytes)))
	}
	for _, f := range r.Findings {
		if f.Level == doctor.Warning {
			p.log.Warn(f.About+": "+f.Says, "fix", f.Fix)
		}
	}
}
