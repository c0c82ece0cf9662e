package store

import (
	"context"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/swap"
	"github.com/kvhost/kvhost/host/kv"
)

// SwapShadow starts a shadow in place of the one that has its name. When that fails the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error {
	return changing(ctx, s, func(w *swap.Store) error { return w.SwapShadow(ctx, s.live.Load().Wish(h)) })
}

// RemoveShadow ends a shadow.
func (s *Store) RemoveShadow(name string) error {
	return changing(context.Background(), s, func(w *swap.Store) error { return w.RemoveShadow(name) })
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
