package host

import (
	"slices"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// near says which NUMA node each GPU hangs on, where the machine has several and says so, and lists those nodes.
func (h *Host) near(t staging.Topology, devices []gds.Device) (places map[gds.UUID]staging.Node, nodes []int) {
	places = map[gds.UUID]staging.Node{}
	for _, d := range devices {
		node, ok, err := t.Near(d.PCI)
		if err != nil {
			h.log.Debug("the machine does not say where a GPU is", "gpu", d.UUID.String(), "pci", d.PCI, "error", err)
		}
		if ok {
			places[d.UUID] = node
			nodes = append(nodes, node.ID)
		}
	}
	slices.Sort(nodes)
	return places, slices.Compact(nodes)
}

// placeStaging has the staging memory taken near the GPUs, before they page-lock it, and logs what it is made of.
func (h *Host) placeStaging(nodes []int) {
	if err := h.engine.Near(nodes...); err != nil {
		h.log.Warn("staging memory is not kept near the GPUs", "error", err)
		nodes = nil
	}
	h.log.Info("staging memory", "bytes", h.cfg.Engine.MaxStagingMemory, "pages", string(h.engine.Pages()), "numa_nodes", nodes)
}
