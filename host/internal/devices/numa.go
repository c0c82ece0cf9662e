package devices

import (
	"slices"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// numaNodes returns the NUMA node of each GPU and the list of those nodes. Both are empty unless the machine has several nodes
// and reports them.
func (d *Devices) numaNodes(t staging.Topology, devices []gds.Device) (places map[gds.UUID]staging.Node, nodes []int) {
	places = map[gds.UUID]staging.Node{}
	for _, dev := range devices {
		node, ok, err := t.Near(dev.PCI)
		if err != nil {
			d.log.Debug("NUMA node of GPU unknown", "gpu", dev.UUID.String(), "pci", dev.PCI, "error", err)
		}
		if ok {
			places[dev.UUID] = node
			nodes = append(nodes, node.ID)
		}
	}
	slices.Sort(nodes)
	return places, slices.Compact(nodes)
}

// placeStaging moves the staging memory to the nodes of the GPUs, before the GPUs page-lock it. It logs the size and the kind
// of pages.
func (d *Devices) placeStaging(engine *transfer.Engine, nodes []int) {
	if err := engine.Near(nodes...); err != nil {
		d.log.Warn("staging memory not bound to the NUMA nodes of the GPUs", "error", err)
		nodes = nil
	}
	d.log.Info("staging memory", "bytes", d.cfg.Engine.MaxStagingMemory, "pages", string(engine.Pages()), "numa_nodes",
		nodes)
}
