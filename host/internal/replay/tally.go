package replay

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/client"
)

// tally holds the counts of one engine. A chunk counts once, however many ranks it has.
type tally struct {
	requests, accesses, hits             int64
	bytesLoaded, bytesStored, mismatched int64
	kept, resident, refused, shed        int64
	failedLoads, failedStores            int64
	lookups, loads, stores               []time.Duration
	firstFailure, firstMismatch          error
}

// loaded counts a load of hits chunks, of which the first is the request's chunk first. It appends the chunks that must be
// stored again.
func (t *tally) loaded(outcomes []loaded, hits, first int, again []int) []int {
	for i := range hits {
		good := true
		for r := range outcomes {
			o := &outcomes[r]
			if o.failed[i] || o.wrong[i] > 0 {
				good = false
			}
			if t.mismatched += o.wrong[i]; o.wrong[i] > 0 && t.firstMismatch == nil {
				t.firstMismatch = fmt.Errorf("request %d, chunk %d, rank %d: %d bytes", t.requests+1, first+i, r,
					o.wrong[i])
			}
		}
		if good {
			t.hits++
		} else {
			again = append(again, first+i)
		}
	}
	for r := range outcomes {
		t.bytesLoaded += outcomes[r].result.Bytes
		for _, f := range outcomes[r].result.Failed {
			t.firstFailure = cmp.Or(t.firstFailure, f.Err)
		}
		for _, failed := range outcomes[r].failed {
			if failed {
				t.failedLoads++
			}
		}
	}
	return again
}

// stored counts a store. A chunk counts with the worst result of its ranks.
func (t *tally) stored(results []client.StoreResult) {
	for i := range results[0].Chunks {
		var seen [client.Failed + 1]bool
		for _, r := range results {
			c := r.Chunks[i]
			seen[c.Result] = true
			if c.Result == client.Failed {
				t.firstFailure = cmp.Or(t.firstFailure, c.Err)
			}
		}
		switch {
		case seen[client.Failed]:
			t.failedStores++
		case seen[client.Shed]:
			t.shed++
		case seen[client.Refused]:
			t.refused++
		case seen[client.Stored]:
			t.kept++
		default:
			t.resident++
		}
	}
	for _, r := range results {
		t.bytesStored += r.Bytes
	}
}

func (t *tally) merge(o *tally) {
	for _, f := range []struct{ into, from *int64 }{
		{&t.requests, &o.requests}, {&t.accesses, &o.accesses}, {&t.hits, &o.hits},
		{&t.bytesLoaded, &o.bytesLoaded}, {&t.bytesStored, &o.bytesStored}, {&t.mismatched, &o.mismatched},
		{&t.kept, &o.kept}, {&t.resident, &o.resident}, {&t.refused, &o.refused}, {&t.shed, &o.shed},
		{&t.failedLoads, &o.failedLoads}, {&t.failedStores, &o.failedStores},
	} {
		*f.into += *f.from
	}
	t.lookups = append(t.lookups, o.lookups...)
	t.loads = append(t.loads, o.loads...)
	t.stores = append(t.stores, o.stores...)
	t.firstFailure = cmp.Or(t.firstFailure, o.firstFailure)
	t.firstMismatch = cmp.Or(t.firstMismatch, o.firstMismatch)
}
