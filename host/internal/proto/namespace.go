package proto

import (
	"fmt"
	"maps"

	"github.com/kvhost/kvhost/host/kv"
)

// Limits of a namespace on the wire, so that reading one is cheap regardless of its content.
const (
	MaxGroups   = 256
	MaxExtra    = 64
	MaxParallel = 1 << 16 // limit of each parallel size, so that their product does not overflow
)

// FromNamespace returns the message for a namespace.
func FromNamespace(n *kv.Namespace) *Namespace {
	m := &Namespace{
		Model: n.Model, Revision: n.Revision, Dtype: n.DType, Engine: n.Engine,
		HashAlgorithm: n.HashAlgorithm, HashSeed: n.HashSeed,
		KeyBytes: uint32(n.KeyBytes), TokensPerBlock: uint32(n.TokensPerBlock),
		TensorParallel: uint32(n.TensorParallel), PipelineStages: uint32(n.PipelineStages), ContextParallel: uint32(n.ContextParallel),
		Replicated: n.Replicated, Units: uint32(n.Units), Extra: maps.Clone(n.Extra), PageDtype: n.PageDType,
	}
	for _, g := range n.Groups {
		out := &Group{Id: g.ID, Blocks: g.Geometry.Blocks, Lookup: LookupKind_LOOKUP_KIND_PREFIX}
		if g.Lookup == kv.ByMembership {
			out.Lookup = LookupKind_LOOKUP_KIND_MEMBERSHIP
		}
		for _, p := range g.Geometry.Planes {
			out.Planes = append(out.Planes, &Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes})
		}
		m.Groups = append(m.Groups, out)
	}
	return m
}

// ToNamespace reads and validates a namespace.
func (m *Namespace) ToNamespace() (*kv.Namespace, error) {
	switch {
	case m == nil:
		return nil, fmt.Errorf("%w: no namespace", ErrMessage)
	case len(m.Groups) > MaxGroups:
		return nil, fmt.Errorf("%w: %d groups, at most %d", ErrMessage, len(m.Groups), MaxGroups)
	case len(m.Extra) > MaxExtra:
		return nil, fmt.Errorf("%w: %d extra fields, at most %d", ErrMessage, len(m.Extra), MaxExtra)
	case max(m.TensorParallel, m.PipelineStages, m.ContextParallel, m.Units) > MaxParallel:
		return nil, fmt.Errorf("%w: a parallel size is above %d", ErrMessage, MaxParallel)
	}
	n := &kv.Namespace{
		Model: m.Model, Revision: m.Revision, DType: m.Dtype, Engine: m.Engine,
		HashAlgorithm: m.HashAlgorithm, HashSeed: m.HashSeed,
		KeyBytes: int(m.KeyBytes), TokensPerBlock: int(m.TokensPerBlock),
		TensorParallel: int(m.TensorParallel), PipelineStages: int(m.PipelineStages), ContextParallel: int(m.ContextParallel),
		Replicated: m.Replicated, Units: int(m.Units), Extra: m.Extra, PageDType: m.PageDtype,
	}
	for i, g := range m.Groups {
		out, err := g.group()
		if err != nil {
			return nil, fmt.Errorf("%w: groups[%d].%w", ErrMessage, i, err)
		}
		n.Groups = append(n.Groups, out)
	}
	if err := n.Validate(); err != nil {
		return nil, err
	}
	return n, nil
}

func (m *Group) group() (kv.Group, error) {
	g := kv.Group{ID: m.GetId(), Geometry: kv.Geometry{Blocks: m.GetBlocks()}}
	switch m.GetLookup() {
	case LookupKind_LOOKUP_KIND_PREFIX:
		g.Lookup = kv.ByPrefix
	case LookupKind_LOOKUP_KIND_MEMBERSHIP:
		g.Lookup = kv.ByMembership
	default:
		return g, fmt.Errorf("lookup: %d is neither prefix nor membership", m.GetLookup())
	}
	if len(m.GetPlanes()) > kv.MaxPlanes {
		return g, fmt.Errorf("planes: %d, at most %d", len(m.GetPlanes()), kv.MaxPlanes)
	}
	for _, p := range m.GetPlanes() {
		g.Geometry.Planes = append(g.Geometry.Planes, kv.Plane{Layer: p.GetLayer(), Part: p.GetPart(), PageBytes: p.GetPageBytes()})
	}
	return g, nil
}
