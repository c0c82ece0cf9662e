package transfer

import (
	"cmp"
	"slices"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// Stats are an engine's counters since it was made. Bytes are file bytes.
type Stats struct {
	StoredFiles, StoredBytes, StoreErrors int64
	StoresShed                            int64 // pieces that waited too long for a worker
	LoadedFiles, LoadedBytes, LoadErrors  int64
	SlotsInUse, Slots                     int
}

func (e *Engine) Stats() Stats {
	c := &e.stats
	return Stats{
		StoredFiles: c.storedFiles.Load(), StoredBytes: c.storedBytes.Load(), StoreErrors: c.storeErrors.Load(),
		StoresShed:  c.storesShed.Load(),
		LoadedFiles: c.loadedFiles.Load(), LoadedBytes: c.loadedBytes.Load(), LoadErrors: c.loadErrors.Load(),
		SlotsInUse: e.slots.InUse(), Slots: e.slots.Capacity(),
	}
}

// Traffic returns the moved pieces, by device, root and direction.
func (e *Engine) Traffic() (list []Traffic) {
	e.trafficMu.RLock()
	defer e.trafficMu.RUnlock()
	for key, t := range e.traffic {
		list = append(list, t.read(key))
	}
	slices.SortFunc(list, func(a, b Traffic) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Root, b.Root), cmp.Compare(a.Kind, b.Kind))
	})
	return list
}

// QueueStats counts the queued and running tasks of a device.
type QueueStats struct {
	Device string
	staging.WorkersStats
}

func (e *Engine) Queues() (list []QueueStats) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, q := range e.queues {
		list = append(list, QueueStats{q.device, q.workers.Stats()})
	}
	slices.SortFunc(list, func(a, b QueueStats) int { return cmp.Compare(a.Device, b.Device) })
	return list
}

// RouteStats is one route's state and counters.
type RouteStats struct {
	GPU, Root            string
	Route                string // "direct" or "staged": the present route
	Via, Why             string
	Stores, Loads, Bytes int64           // moved by the direct route; Bytes are file bytes
	StoreFallbacks       int64           // failed stores that were staged
	LoadFallbacks        int64           // failed loads that were staged
	StoresHung           int64           // stores that failed because cuFile hung
	Hung                 int             // abandoned operations shared by all roots of the GPU that have not returned
	Full                 int64           // operations that found no slot and were staged
	Mismatched           int64           // loads with wrong bytes by the direct route only
	Suspended, Resumed   int64           // times that the route was suspended, and resumed
	SlotsInUse           int             // of all roots of the GPU together
	SlotBytes            int64           // of all roots of the GPU together
	Handles              gds.HandleStats // of all roots of the GPU together
}

// Routes returns the state and counters of all routes, by GPU and root.
func (e *Engine) Routes() []RouteStats {
	e.direct.mu.RLock()
	defer e.direct.mu.RUnlock()
	var out []RouteStats
	direct := map[string]*gds.DirectRoute{} // by GPU, since all roots of a GPU share its direct route
	for _, r := range e.direct.chosen {
		if r.choice.Direct != nil {
			direct[r.gpu] = r.choice.Direct
		}
	}
	for _, r := range e.direct.chosen {
		s := RouteStats{
			GPU: r.gpu, Root: r.root, Route: "staged", Via: r.choice.Via, Why: r.choice.Why,
			Stores: r.stores.Load(), Loads: r.loads.Load(), Bytes: r.bytes.Load(),
			StoreFallbacks: r.storeFallbacks.Load(), LoadFallbacks: r.loadFallbacks.Load(), Full: r.full.Load(),
			StoresHung: r.storesHung.Load(), Mismatched: r.mismatched.Load(), Suspended: r.suspended.Load(),
			Resumed: r.resumed.Load(),
		}
		r.mu.Lock()
		if r.choice.Direct != nil && r.active() {
			s.Route = "direct"
		}
		r.mu.Unlock()
		if d := direct[r.gpu]; d != nil {
			s.SlotsInUse, s.SlotBytes = d.Slots()
			s.Handles = d.Handles.Stats()
			s.Hung = d.GPU().Hung()
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b RouteStats) int { return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Root, b.Root)) })
	return out
}
