package observe

import (
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// Transfers by GPU (or "host" for host memory), root, route and direction.
var (
	gpuInService = gauged("gpu_in_service",
		"1 while a GPU is used, 0 once its context is lost: only a new process can use it again.", "gpu")
	transferSeconds = gauged("transfer_seconds",
		"Time of a piece from its opening to its delivery or publication.", "gpu root route direction")
	transferBytes    = counted("transfer_bytes_total", "File bytes of pieces that arrived.", "gpu root route direction")
	transferErrors   = counted("transfer_errors_total", "Pieces that failed.", "gpu root route direction")
	transferInFlight = gauged("transfer_in_flight", "Pieces on their way.", "gpu root route direction")
	transferBusy     = counted("transfer_busy_seconds_total",
		"Time in which at least one piece was on its way: its rate is the utilisation.", "gpu root direction")
	transferRouteBusy = counted("transfer_route_busy_seconds_total",
		"Time in which at least one piece was on its way by the route.", "gpu root route direction")
	transferQueued = gauged("transfer_queued",
		"Tasks that wait for a thread: the queue's depth. Its turn gives a task its route; a layer-wise load's wait at the root of its first chunk.",
		"gpu root direction")
	transferThreads = gauged("transfer_threads", "Threads of a queue by state.", "gpu state")
	routeDirect     = gauged("route_direct", "1 while pieces go through cuFile.", "gpu root via")
	routeFallbacks  = counted("route_fallbacks_total",
		"Pieces that were staged because their direct operation failed.", "gpu root direction")
	routeFull        = counted("route_full_total", "Pieces that found no slot of device memory and were staged.", "gpu root")
	routeSuspensions = counted("route_suspensions_total", "How often the direct route was suspended after failures.", "gpu root")
	routeResumptions = counted("route_resumptions_total", "How often a suspended direct route was resumed.", "gpu root")
	routeHungStores  = counted("route_hung_stores_total", "Pieces that were not stored because cuFile did not answer in time.", "gpu root")
	routeHung        = gauged("route_hung_operations", "cuFile operations that were abandoned and have not returned.", "gpu")
	routeMismatches  = counted("route_mismatches_total", "Pieces with wrong bytes by the direct route alone.", "gpu root")
	directSlots      = gauged("direct_slots_in_use", "Slots of device memory in use.", "gpu")
	directSlotBytes  = gauged("direct_slot_bytes", "Device memory of the slots.", "gpu")
	handles          = counted("handle_cache_total", "Files that were found registered with cuFile, or had to be.", "gpu result")
	handlesOpen      = gauged("handle_cache_open", "Files registered with cuFile.", "gpu")
	handlesEvicted   = counted("handle_cache_evictions_total", "Registered files that made room for others.", "gpu")
)

// Direction is the word for a kind of task.
func Direction(k staging.Kind) string {
	if k == staging.Read {
		return "load"
	}
	return "store"
}

func GPULabel(device string) string {
	if device == "" {
		return "host"
	}
	return device
}

func collectTransfers(out series, e *transfer.Engine, gpus []*gds.GPU) {
	for _, g := range gpus {
		out.put(gpuInService, boolean(g.Err() == nil), g.UUID.String())
	}
	for _, t := range e.Traffic() {
		gpu, way := GPULabel(t.Device), Direction(t.Kind)
		out.put(transferBusy, t.Busy.Seconds(), gpu, t.Root, way)
		for i := range t.Routes {
			m := &t.Routes[i]
			labels := []string{gpu, t.Root, m.Route, way}
			out.put(transferInFlight, float64(m.InFlight), labels...)
			out.put(transferRouteBusy, m.Busy.Seconds(), labels...)
			histogram(out, transferSeconds, m.Took.Seconds(), transfer.TrafficBounds[:], m.Buckets[:], labels...)
			out.put(transferBytes, float64(m.Bytes), labels...)
			out.put(transferErrors, float64(m.Errors), labels...)
		}
	}
	for _, q := range e.Queues() {
		gpu := GPULabel(q.Device)
		for _, l := range q.Lanes {
			out.put(transferQueued, float64(l.QueuedRead), gpu, l.Name, "load")
			out.put(transferQueued, float64(l.QueuedWrite), gpu, l.Name, "store")
		}
		out.put(transferThreads, float64(q.Running), gpu, "busy")
		out.put(transferThreads, float64(q.Workers-q.Running), gpu, "idle")
	}
	seen := map[string]bool{}
	for _, r := range e.Routes() {
		out.put(routeDirect, boolean(r.Route == "direct"), r.GPU, r.Root, r.Via)
		out.put(routeFallbacks, float64(r.StoreFallbacks), r.GPU, r.Root, "store")
		out.put(routeFallbacks, float64(r.LoadFallbacks), r.GPU, r.Root, "load")
		out.put(routeFull, float64(r.Full), r.GPU, r.Root)
		out.put(routeSuspensions, float64(r.Suspended), r.GPU, r.Root)
		out.put(routeResumptions, float64(r.Resumed), r.GPU, r.Root)
		out.put(routeHungStores, float64(r.StoresHung), r.GPU, r.Root)
		out.put(routeMismatches, float64(r.Mismatched), r.GPU, r.Root)
		if seen[r.GPU] { // the rest is per GPU
			continue
		}
		seen[r.GPU] = true
		out.put(routeHung, float64(r.Hung), r.GPU)
		out.put(directSlots, float64(r.SlotsInUse), r.GPU)
		out.put(directSlotBytes, float64(r.SlotBytes), r.GPU)
		out.put(handles, float64(r.Handles.Hits), r.GPU, "hit")
		out.put(handles, float64(r.Handles.Misses), r.GPU, "miss")
		out.put(handlesOpen, float64(r.Handles.Open), r.GPU)
		out.put(handlesEvicted, float64(r.Handles.Evictions), r.GPU)
	}
}
