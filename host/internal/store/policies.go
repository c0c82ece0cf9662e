package store

import (
	"context"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// evictPolicy takes a reference to a policy that is about to evict; nil is the built-in one.
func (s *Store) evictPolicy(h *policy.Handle) *evictor.Policy {
	if h == nil {
		h = policy.BuiltinHandle(abi.RoleEvict)
	} else {
		h.Acquire()
	}
	return &evictor.Policy{Handle: h, Since: s.cfg.Now()}
}

// openCatalog opens the policies that are bound to namespaces.
func (s *Store) openCatalog(ctx context.Context) (err error) {
	p := &s.cfg.Policies
	s.catalog, err = catalog.New(ctx, catalog.Options{
		Log: s.log, Now: s.cfg.Now, Seed: s.cfg.Seed, Capacity: uint64(s.cfg.Capacity()), Expiry: s.cfg.ttl, Roots: keptFiles{s},
		Compression: s.cfg.Compression, AdmitFault: s.admissionFault,
		Policies: catalog.Policies{Admit: p.Admit, Place: p.Place, Layout: p.Layout, Rules: p.Rules},
	})
	return err
}
