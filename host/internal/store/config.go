package store

import "github.com/kvhost/kvhost/host/internal/store/settings"

// How a store is configured.
type (
	Config     = settings.Config
	RootConfig = settings.RootConfig
	Policies   = settings.Policies
	Shadow     = settings.Shadow
	Quota      = settings.Quota
	Expiry     = settings.Expiry
	Moves      = settings.Moves
	EvictMode  = settings.EvictMode
	Durability = settings.Durability
)

// When entries are evicted, and what a publication survives.
const (
	OnDemand   = settings.OnDemand
	Background = settings.Background

	None   = settings.None
	Batch  = settings.Batch
	Strict = settings.Strict
)

// MaxLevels is one more than the highest level of a root.
const MaxLevels = settings.MaxLevels
