package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
)

// Namespace opens a namespace: the same one gives the same pointer. Its text and its plans are durable in every root
// before it returns, because a restart can make nothing of a piece without them.
func (s *Store) Namespace(ctx context.Context, n *chunk.Namespace) (*catalog.Namespace, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if s.closed.Load() {
		return nil, ErrClosed
	}
	ns, err := s.catalog.Open(ctx, n)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return ns, nil
}

// Claims says whether a path below a root is one that a policy of this store gives to a piece, or gave once. A scan
// leaves damaged files with other paths alone and does not count them.
func (s *Store) Claims(rel string) bool { return s.catalog.Claims(rel) }

// loadGenerations opens the place policies of earlier runs.
func (s *Store) loadGenerations(ctx context.Context) error {
	err := s.eachRoot(ctx, func(r *root) error { return r.kept.LoadGenerations(ctx) })
	if err != nil {
		return err
	}
	return s.catalog.KeepGenerations()
}
