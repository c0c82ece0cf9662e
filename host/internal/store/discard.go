package store

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// DiscardRequest names entries of one group that are no longer needed.
type DiscardRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Keys      []kv.Key
	Tenant    uint32 // entries of other tenants stay
}

// DiscardResult is the result for one key of a [DiscardRequest].
type DiscardResult uint8

// Results of a discard.
const (
	DiscardAbsent DiscardResult = iota
	DiscardRemoved
	DiscardInUse       // leased, or a piece of it is being loaded or stored
	DiscardOtherTenant // stored by another tenant
	DiscardUnavailable // in a root that cannot be written or is still being scanned, or stored by a tenant that is not known yet
)

// discardStep is the maximum number of keys that are searched under a root's lock at a time.
const discardStep = 256

// Discard removes entries with all their pieces, except entries in use and entries that another tenant stored. A copy between
// levels does not count as use: it is cancelled. Discard returns a result for each key. Lookups miss a removed entry at once,
// and its files are unlinked before Discard returns. Files in a shared root are unlinked by the evicting host, unless another
// host uses them.
func (s *Store) Discard(q DiscardRequest) ([]DiscardResult, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	results := make([]DiscardResult, len(q.Keys))
	for range min(2, len(s.levels)) { // the second pass finds entries that moved to a root before their removal was noticed
		for _, r := range s.roots {
			for from := 0; from < len(q.Keys); from += discardStep {
				to := min(from+discardStep, len(q.Keys))
				r.discard(c, q.Keys[from:to], q.Tenant, results[from:to])
			}
		}
	}
	return results, nil
}

// and combines the results for a key in two roots. With several levels, another copy may be left.
func (d DiscardResult) and(o DiscardResult, levels int) DiscardResult {
	if levels == 1 && (d == DiscardRemoved || o == DiscardRemoved) {
		return DiscardRemoved
	}
	return max(d, o)
}

// discard removes the entries of keys in this root.
func (r *root) discard(c *catalog.Class, keys []kv.Key, tenant uint32, results []DiscardResult) {
	var removed []entries.Eviction
	_ = r.store.discarding.Take(context.Background(), tenant)
	r.Lock()
	for i := range keys {
		slot := r.Index.Find(c.Printer.Print(&keys[i]), c.Base, &keys[i])
		if slot != index.None && r.Index.At(slot).Is(index.Evicting) {
			continue
		}
		result := r.discardable(slot, tenant)
		if result == DiscardRemoved {
			removed = append(removed, r.BeginEvict(slot))
		}
		results[i] = results[i].and(result, len(r.store.levels))
	}
	r.Count.Discarded += uint64(len(removed))
	r.Unlock()
	r.store.discarding.Give()
	for i := range removed {
		_, _ = r.owner.unlink(&removed[i], removed[i].Pieces) // it logs failures and retries
	}
	r.Lock()
	for i := range removed {
		r.FinishEvict(&removed[i])
	}
	r.Unlock()
}

// discardable returns the result for the entry in a slot: DiscardRemoved if it can be removed. The root's lock must be held.
func (r *root) discardable(slot, tenant uint32) DiscardResult {
	switch {
	case slot == index.None && (r.Scanning() || r.unavailable.Load()):
		return DiscardUnavailable
	case slot == index.None:
		return DiscardAbsent
	case !r.Health.Takes() || !r.owner.grants() || r.Index.At(slot).Is(index.Listed):
		return DiscardUnavailable
	case r.TenantOf(slot) != tenant:
		return DiscardOtherTenant
	case !r.Unused(slot):
		return DiscardInUse
	}
	return DiscardRemoved
}
