package host

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/staging"
)

// openDriver loads the CUDA driver. Where there is none it says so once, and the host serves host memory.
func (h *Host) openDriver() {
	if h.cfg.GDS.CUDA == config.CUDAOff {
		return
	}
	driver, err := gds.Open(h.log)
	if err != nil {
		h.log.Info("no GPU is used, clients can register host memory only", "reason", err)
		return
	}
	h.driver = driver
}

// openGPUs takes the machine's GPUs into use. One that cannot be used is left out and named.
func (h *Host) openGPUs() error {
	if h.driver == nil {
		return nil
	}
	driver := h.driver
	devices, err := driver.Devices()
	if err != nil {
		return fmt.Errorf("list the GPUs: %w", err)
	}
	places, nodes := h.near(staging.SystemTopology(), devices)
	h.placeStaging(nodes)
	for _, d := range devices {
		place, ok := places[d.UUID]
		if !ok {
			place.ID = staging.NoNode
		}
		use := GPUConfig(h.cfg)
		use.CPUs = place.CPUs
		g, err := driver.OpenGPU(d.UUID, use)
		if err != nil {
			h.log.Warn("a GPU cannot be used", "gpu", d.UUID.String(), "name", d.Name, "error", err)
			continue
		}
		h.gpus = append(h.gpus, g)
		if err := h.engine.AddGPU(g); err != nil {
			h.log.Warn("copies to and from a GPU will be slow", "gpu", d.UUID.String(), "error", err)
		}
		h.log.Info("a GPU is used", "gpu", d.UUID.String(), "name", d.Name, "pci", d.PCI, "memory", d.Memory, "cuda", driver.Version(), "copies", g.Mode().String(), "numa_node", place.ID)
	}
	return nil
}

// mostWindow is the largest window that a copy thread gets: larger slots are no quicker, and take device memory from the model.
const mostWindow = 16 << 20

// GPUConfig is how a configuration uses a GPU.
func GPUConfig(c *config.Config) gds.Config {
	return gds.Config{
		Threads: c.Engine.ThreadsPerGPU, Files: c.GDS.MaxConcurrentOps, Blocks: c.GDS.CopyBlocks,
		Window: min(int(c.Engine.SlotBytes), mostWindow),
	}
}

// Lost is why GPUs went out of service, nil while none has. The host goes on without them, and [Host.Run] ends with this.
func (h *Host) Lost() error {
	var errs []error
	for _, g := range h.gpus {
		errs = append(errs, g.Err())
	}
	return errors.Join(errs...)
}
