package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/shadow"
	"github.com/kvhost/kvhost/host/store/settings"
)

// AddShadow starts a shadow. Its name must be unique among the shadows.
func (s *Store) AddShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, false) }

// SwapShadow starts a shadow in place of the one that has its name. When that fails the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, true) }

func (s *Store) startShadow(ctx context.Context, h Shadow, swap bool) error {
	if err := s.swapping.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.swapping.Release(1)
	if s.closed.Load() {
		return ErrClosed
	}
	p := s.evictPolicy(h.Policy)
	switch there := s.shadows.Has(p.Label); {
	case swap && !there:
		p.Release()
		return fmt.Errorf("store: shadow %s: %w", p.Label, ErrNoPolicy)
	case !swap && there:
		p.Release()
		return fmt.Errorf("store: shadow %s: %w: there is one of that name", p.Label, ErrConfig)
	}
	capacity := h.Capacity
	if capacity == 0 {
		for _, r := range s.cfg.Roots {
			capacity += r.Capacity
		}
	}
	options := policy.EvictOptions{
		MaxSlots: settings.SlotsFor(capacity), Capacity: uint64(capacity), Seed: s.cfg.Seed, Config: p.Config,
	}
	if err := s.shadows.Start(ctx, p.Handle, p.Since, options); err != nil {
		return fmt.Errorf("store: shadow %s: %w", p.Label, err)
	}
	return nil
}

// RemoveShadow ends a shadow.
func (s *Store) RemoveShadow(name string) error {
	_ = s.swapping.Acquire(context.Background(), 1) // never ends
	defer s.swapping.Release(1)
	if !s.shadows.End(name) {
		return fmt.Errorf("%w: shadow %s", ErrNoPolicy, name)
	}
	return nil
}

// offer tells the shadows of a chunk that a client wants to store, whether or not it is stored.
func (p *Put) offer(s *Store, q *PutRequest) {
	if !s.shadows.On() {
		return
	}
	s.shadows.Tell(shadow.Step{
		Op: shadow.Offer, Key: p.mark.Fingerprint, Time: s.seq.Clock(),
		Parent: chunk.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent),
		Size:   uint32(p.entryBytes() / abi.SizeUnit), Depth: q.Depth, Request: q.Request, Tenant: q.Tenant,
	})
}
