package observe

import (
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// ofRoute has the figures of transfers by GPU (or "host" for host memory), root, route and direction.
var ofRoute = of[transfer.RouteTraffic]("gpu root route direction",
	figure{"Bytes", "transfer_bytes_total", "bytes", "File bytes of pieces that arrived."},
	figure{"Errors", "transfer_errors_total", "errors", "Pieces that failed."},
	figure{"InFlight", "transfer_in_flight", "in_flight", "Pieces on their way."},
	figure{"Busy", "transfer_route_busy_seconds_total", "busy", "Time in which at least one piece was on its way by the route."},
	figure{from: "Files", status: "files"},
)

var ofDirect = of[transfer.RouteStats]("gpu root",
	figure{"Full", "route_full_total", "", "Pieces that found no slot of device memory and were staged."},
	figure{"Suspended", "route_suspensions_total", "", "How often the direct route was suspended after failures."},
	figure{"Mismatched", "route_mismatches_total", "", "Pieces with wrong bytes by the direct route alone."},
)

var (
	gpuInService = newFamily("gpu_in_service",
		"1 while a GPU is used, 0 once its context is lost: only a new process can use it again.", "gpu")
	transferSeconds = newFamily("transfer_seconds",
		"Time of a piece from its opening to its delivery or publication.", "gpu root route direction")
	transferBusy = newFamily("transfer_busy_seconds_total",
		"Time in which at least one piece was on its way: its rate is the utilisation.", "gpu root direction")
	transferQueued = newFamily("transfer_queued",
		"Tasks that wait for a thread: the queue's depth. Its turn gives a task its route; a layer-wise load's wait at the root of its first chunk.",
		"gpu root direction")
	transferThreads = newFamily("transfer_threads", "Threads of a queue by state.", "gpu state")
	routeDirect     = newFamily("route_direct", "1 while pieces go through cuFile.", "gpu root via")
	routeFallbacks  = newFamily("route_fallbacks_total",
		"Pieces that were staged because their direct operation failed.", "gpu root direction")
)

// direction returns the name of a kind of task.
func direction(k staging.Kind) string {
	if k == staging.Read {
		return "load"
	}
	return "store"
}

func gpuLabel(device string) string {
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
		gpu, way := gpuLabel(t.Device), direction(t.Kind)
		out.put(transferBusy, t.Busy.Seconds(), gpu, t.Root, way)
		for i := range t.Routes {
			m := &t.Routes[i]
			labels := []string{gpu, t.Root, m.Route, way}
			ofRoute.put(out, m, labels...)
			histogram(out, transferSeconds, m.Took.Seconds(), transfer.TrafficBounds[:], m.Buckets[:], labels...)
		}
	}
	for _, q := range e.Queues() {
		gpu := gpuLabel(q.Device)
		for _, l := range q.Lanes {
			out.put(transferQueued, float64(l.QueuedRead), gpu, l.Name, "load")
			out.put(transferQueued, float64(l.QueuedWrite), gpu, l.Name, "store")
		}
		out.put(transferThreads, float64(q.Running), gpu, "busy")
		out.put(transferThreads, float64(q.Workers-q.Running), gpu, "idle")
	}
	for _, r := range e.Routes() {
		out.put(routeDirect, boolean(r.Route == "direct"), r.GPU, r.Root, r.Via)
		out.put(routeFallbacks, float64(r.StoreFallbacks), r.GPU, r.Root, "store")
		out.put(routeFallbacks, float64(r.LoadFallbacks), r.GPU, r.Root, "load")
		ofDirect.put(out, &r, r.GPU, r.Root)
	}
}

func routeStatus(t *transfer.Traffic, r *transfer.RouteTraffic) *proto.RouteStatus {
	out := &proto.RouteStatus{Gpu: gpuLabel(t.Device), Root: t.Root, Route: proto.Value[proto.Route](r.Route),
		Direction: proto.Value[proto.Direction](direction(t.Kind))}
	ofRoute.fill(out, r)
	return out
}
