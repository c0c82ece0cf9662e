package store

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// DiscardRequest names entries of one group that are not needed any more.
type DiscardRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Keys      []kv.Key
	Tenant    uint32 // entries of others stay
}

// DiscardResult says what became of one key of a [DiscardRequest].
type DiscardResult uint8

// The results.
const (
	DiscardAbsent DiscardResult = iota
	DiscardRemoved
	DiscardInUse       // a lease has it, or a piece of it is being loaded or stored
	DiscardOtherTenant // another tenant stored it
	DiscardUnavailable // it is, or may be, in a root that cannot be written to or is still being scanned, or it is not known yet who stored it
)

// discardStep is how many keys are looked for under a root's lock at a time.
const discardStep = 256

// Discard removes entries with all their pieces, but none that is in use or that another tenant stored. A copy from one
// level to another is no use: it ends without a result. Discard returns one result for each key. Lookups miss a removed
// entry at once, and its files are unlinked before Discard returns. Those in a shared root the evicting host unlinks,
// unless another host uses them.
func (s *Store) Discard(q DiscardRequest) ([]DiscardResult, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	results := make([]DiscardResult, len(q.Keys))
	for range min(2, len(s.levels)) { // what moved to a root before it was seen to have gone is found the second time
		for _, r := range s.roots {
			for from := 0; from < len(q.Keys); from += discardStep {
				to := min(from+discardStep, len(q.Keys))
				r.discard(c, q.Keys[from:to], q.Tenant, results[from:to])
			}
		}
	}
	return results, nil
}

// and is the result for a key that has these two in two roots. Where there are levels, another copy may be left.
func (d DiscardResult) and(o DiscardResult, levels int) DiscardResult {
	if levels == 1 && (d == DiscardRemoved || o == DiscardRemoved) {
		return DiscardRemoved
	}
	return max(d, o)
}

// discard removes the entries of keys that are in this root.
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
		_, _ = r.owner.unlink(&removed[i], removed[i].Pieces) // it logs what fails, and retries
	}
	r.Lock()
	for i := range removed {
		r.FinishEvict(&removed[i])
	}
	r.Unlock()
}

// discardable says what becomes of the entry in a slot: DiscardRemoved if it can be removed. The caller holds the
// root's lock.
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
