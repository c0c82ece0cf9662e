package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/kv"
)

// Namespace opens a namespace: the same one gives the same pointer. Its text and its plans are durable in every root
// before it returns, because a restart can make nothing of a piece without them.
func (s *Store) Namespace(ctx context.Context, n *kv.Namespace) (*catalog.Namespace, error) {
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
