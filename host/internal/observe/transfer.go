package observe

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// transferCollector exports transfers by GPU (or "host" for host memory), root, route and direction.
type transferCollector struct {
	engine *transfer.Engine
	gpus   []*gds.GPU

	inService                            *prometheus.Desc
	seconds, bytes, errors               *prometheus.Desc
	inFlight, busy, routeBusy            *prometheus.Desc
	queued, workers                      *prometheus.Desc
	direct, fallbacks, full              *prometheus.Desc
	suspensions, resumptions, mismatched *prometheus.Desc
	hung, hungNow                        *prometheus.Desc
	slots, slotBytes                     *prometheus.Desc
	handles, handlesOpen, evicts         *prometheus.Desc
}

func newTransferCollector(e *transfer.Engine, gpus []*gds.GPU) *transferCollector {
	desc := func(name, help, labels string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, strings.Fields(labels), nil)
	}
	return &transferCollector{
		engine: e,
		gpus:   gpus,
		inService: desc("gpu_in_service", "1 while a GPU is used, 0 once its context is lost: only a new process can use "+
			"it again.", "gpu"),
		seconds: desc("transfer_seconds", "Time of a piece from its opening to its delivery or publication.",
			"gpu root route direction"),
		bytes:    desc("transfer_bytes_total", "File bytes of pieces that arrived.", "gpu root route direction"),
		errors:   desc("transfer_errors_total", "Pieces that failed.", "gpu root route direction"),
		inFlight: desc("transfer_in_flight", "Pieces on their way.", "gpu root route direction"),
		busy: desc("transfer_busy_seconds_total", "Time in which at least one piece was on its way: its rate is the "+
			"utilisation.", "gpu root direction"),
		routeBusy: desc("transfer_route_busy_seconds_total", "Time in which at least one piece was on its way by the route.", "gpu root route direction"),
		queued: desc("transfer_queued", "Tasks that wait for a thread: the queue's depth. Its turn gives a task its "+
			"route; a layer-wise load's wait at the root of its first chunk.", "gpu root direction"),
		workers: desc("transfer_threads", "Threads of a queue by state.", "gpu state"),
		direct:  desc("route_direct", "1 while pieces go through cuFile.", "gpu root via"),
		fallbacks: desc("route_fallbacks_total", "Pieces whose direct operation failed and that were staged in its place.",
			"gpu root direction"),
		full:        desc("route_full_total", "Pieces that found no slot of device memory and were staged.", "gpu root"),
		suspensions: desc("route_suspensions_total", "How often the direct route was suspended after failures.", "gpu root"),
		resumptions: desc("route_resumptions_total", "How often a suspended direct route was resumed.", "gpu root"),
		hung: desc("route_hung_stores_total", "Pieces that were not stored because cuFile did not answer in time.",
			"gpu root"),
		hungNow:     desc("route_hung_operations", "cuFile operations that were abandoned and have not returned.", "gpu"),
		mismatched:  desc("route_mismatches_total", "Pieces whose bytes were wrong by the direct route alone.", "gpu root"),
		slots:       desc("direct_slots_in_use", "Slots of device memory in use.", "gpu"),
		slotBytes:   desc("direct_slot_bytes", "Device memory of the slots.", "gpu"),
		handles:     desc("handle_cache_total", "Files that were found registered with cuFile, or had to be.", "gpu result"),
		handlesOpen: desc("handle_cache_open", "Files registered with cuFile.", "gpu"),
		evicts:      desc("handle_cache_evictions_total", "Registered files that made room for others.", "gpu"),
	}
}

// Describe sends nothing: the set of series depends on GPUs and roots.
func (c *transferCollector) Describe(chan<- *prometheus.Desc) {}

// Direction is the word for a kind of task.
func Direction(k staging.Kind) string {
	if k == staging.Read {
		return "load"
	}
	return "store"
}

// GPULabel names a device.
func GPULabel(device string) string {
	if device == "" {
		return "host"
	}
	return device
}

// Collect reads the counters.
func (c *transferCollector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, g := range c.gpus {
		send(c.inService, prometheus.GaugeValue, boolean(g.Err() == nil), g.UUID.String())
	}
	for _, t := range c.engine.Traffic() {
		gpu, way := GPULabel(t.Device), Direction(t.Kind)
		send(c.busy, prometheus.CounterValue, t.Busy.Seconds(), gpu, t.Root, way)
		for i := range t.Routes {
			m := &t.Routes[i]
			send(c.inFlight, prometheus.GaugeValue, float64(m.InFlight), gpu, t.Root, m.Route, way)
			send(c.routeBusy, prometheus.CounterValue, m.Busy.Seconds(), gpu, t.Root, m.Route, way)
			buckets, below := map[float64]uint64{}, uint64(0)
			for k, bound := range transfer.TrafficBounds {
				below += uint64(m.Buckets[k])
				buckets[bound] = below
			}
			ch <- prometheus.MustNewConstHistogram(c.seconds, uint64(m.Files), m.Took.Seconds(), buckets, gpu, t.Root, m.Route,
				way)
			send(c.bytes, prometheus.CounterValue, float64(m.Bytes), gpu, t.Root, m.Route, way)
			send(c.errors, prometheus.CounterValue, float64(m.Errors), gpu, t.Root, m.Route, way)
		}
	}
	for _, q := range c.engine.Queues() {
		gpu := GPULabel(q.Device)
		for _, l := range q.Lanes {
			send(c.queued, prometheus.GaugeValue, float64(l.QueuedRead), gpu, l.Name, "load")
			send(c.queued, prometheus.GaugeValue, float64(l.QueuedWrite), gpu, l.Name, "store")
		}
		send(c.workers, prometheus.GaugeValue, float64(q.Running), gpu, "busy")
		send(c.workers, prometheus.GaugeValue, float64(q.Workers-q.Running), gpu, "idle")
	}
	seen := map[string]bool{}
	for _, r := range c.engine.Routes() {
		send(c.direct, prometheus.GaugeValue, boolean(r.Route == "direct"), r.GPU, r.Root, r.Via)
		send(c.fallbacks, prometheus.CounterValue, float64(r.StoreFallbacks), r.GPU, r.Root, "store")
		send(c.fallbacks, prometheus.CounterValue, float64(r.LoadFallbacks), r.GPU, r.Root, "load")
		send(c.full, prometheus.CounterValue, float64(r.Full), r.GPU, r.Root)
		send(c.suspensions, prometheus.CounterValue, float64(r.Suspended), r.GPU, r.Root)
		send(c.resumptions, prometheus.CounterValue, float64(r.Resumed), r.GPU, r.Root)
		send(c.hung, prometheus.CounterValue, float64(r.StoresHung), r.GPU, r.Root)
		send(c.mismatched, prometheus.CounterValue, float64(r.Mismatched), r.GPU, r.Root)
		if seen[r.GPU] { // the rest is per GPU
			continue
		}
		seen[r.GPU] = true
		send(c.hungNow, prometheus.GaugeValue, float64(r.Hung), r.GPU)
		send(c.slots, prometheus.GaugeValue, float64(r.SlotsInUse), r.GPU)
		send(c.slotBytes, prometheus.GaugeValue, float64(r.SlotBytes), r.GPU)
		send(c.handles, prometheus.CounterValue, float64(r.Handles.Hits), r.GPU, "hit")
		send(c.handles, prometheus.CounterValue, float64(r.Handles.Misses), r.GPU, "miss")
		send(c.handlesOpen, prometheus.GaugeValue, float64(r.Handles.Open), r.GPU)
		send(c.evicts, prometheus.CounterValue, float64(r.Handles.Evictions), r.GPU)
	}
}
