package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/kv"
)

// addShadow starts a shadow. Its name must be unique among the shadows.
func (s *Store) addShadow(ctx context.Context, h Shadow) error {
	if s.shadows.Has(h.Policy.Label) {
		return fmt.Errorf("store: shadow %s: %w: there is one of that name", h.Policy.Label, ErrConfig)
	}
	return s.startShadow(ctx, h)
}

// SwapShadow starts a shadow in place of the one that has its name. When that fails the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error {
	return s.changing(ctx, func() error {
		if !s.shadows.Has(h.Policy.Label) {
			return fmt.Errorf("store: shadow %s: %w", h.Policy.Label, ErrNoPolicy)
		}
		return s.startShadow(ctx, h)
	})
}

func (s *Store) startShadow(ctx context.Context, h Shadow) error {
	w := s.live.Load().wish(h)
	if err := s.shadows.Start(ctx, w.Policy.Acquire(), s.cfg.Now(), w.Options); err != nil {
		return fmt.Errorf("store: shadow %s: %w", h.Policy.Label, err)
	}
	return nil
}

// RemoveShadow ends a shadow.
func (s *Store) RemoveShadow(name string) error {
	return s.changing(context.Background(), func() error {
		if !s.shadows.End(name) {
			return fmt.Errorf("%w: shadow %s", ErrNoPolicy, name)
		}
		return nil
	})
}

// offer tells the shadows of a chunk that a client wants to store, whether or not it is stored.
func (p *Put) offer(s *Store, q *PutRequest) {
	if !s.shadows.On() {
		return
	}
	s.shadows.Tell(shadow.Step{
		Op: shadow.Offer, Key: p.mark.Fingerprint, Time: s.seq.Clock(),
		Parent: kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent),
		Size:   uint32(p.entryBytes() / abi.SizeUnit), Depth: q.Depth, Request: q.Request, Tenant: q.Tenant,
	})
}
