package server

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// maxPairs is the maximum number of pairs of model and tenant with counters of their own. Clients choose both, so the number of
// metric series must be bounded.
const maxPairs = 64

// otherModel is the model that further pairs are counted under, with tenant 0.
const otherModel = "other"

// Usage holds the counters of one model and tenant.
type Usage struct {
	Model  string
	Tenant uint32

	Keys, Hits, LoadedBytes, StoredBytes atomic.Uint64
	Paused                               atomic.Int64 // nanoseconds for which sessions did not read: see [budget.Session.Spent]
}

type pair struct {
	model  string
	tenant uint32
}

// UsageTable holds a Usage for each pair of model and tenant. The zero value is ready to use.
type UsageTable struct {
	mu    sync.Mutex
	pairs map[pair]*Usage
}

// Of returns the counters of a pair. Sessions call it once, at HELLO.
func (t *UsageTable) Of(model string, tenant uint32) *Usage {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pairs == nil {
		t.pairs = map[pair]*Usage{}
	}
	p := pair{model, tenant}
	if u := t.pairs[p]; u != nil {
		return u
	}
	if len(t.pairs) >= maxPairs {
		p = pair{model: otherModel}
		if u := t.pairs[p]; u != nil {
			return u
		}
	}
	u := &Usage{Model: p.model, Tenant: p.tenant}
	t.pairs[p] = u
	return u
}

// List returns all counters, sorted by model and tenant.
func (t *UsageTable) List() []*Usage {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.SortedFunc(maps.Values(t.pairs), func(a, b *Usage) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Tenant, b.Tenant))
	})
}
