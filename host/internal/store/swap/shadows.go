package swap

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/settings"
)

// AddShadow starts a shadow. Its name must be unique among the shadows.
func (s *Store) AddShadow(ctx context.Context, w shadow.Wish) error {
	if s.Shadows.Has(w.Policy.Label) {
		return fmt.Errorf("store: shadow %s: %w: there is one of that name", w.Policy.Label, settings.ErrConfig)
	}
	return s.startShadow(ctx, w)
}

// SwapShadow starts a shadow in place of the one that has its name. When that fails the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, w shadow.Wish) error {
	if !s.Shadows.Has(w.Policy.Label) {
		return fmt.Errorf("store: shadow %s: %w", w.Policy.Label, catalog.ErrNoPolicy)
	}
	return s.startShadow(ctx, w)
}

func (s *Store) startShadow(ctx context.Context, w shadow.Wish) error {
	if err := s.Shadows.Start(ctx, w.Policy.Acquire(), s.Now(), w.Options); err != nil {
		return fmt.Errorf("store: shadow %s: %w", w.Policy.Label, err)
	}
	return nil
}

// RemoveShadow ends a shadow.
func (s *Store) RemoveShadow(name string) error {
	if !s.Shadows.End(name) {
		return fmt.Errorf("%w: shadow %s", catalog.ErrNoPolicy, name)
	}
	return nil
}
