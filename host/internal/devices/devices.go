package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// Devices are the GPUs of a host. The zero number of GPUs is normal: the host then serves host memory.
type Devices struct {
	cfg    *config.Config
	log    *slog.Logger
	driver *gds.Driver // nil without GPUs
	gpus   []*gds.GPU
	cufile *gds.CuFile       // nil: everything is staged
	memory map[int]*memfs.FS // of roots in memory
	bucket map[int]*s3fs.FS  // of roots in buckets

	endProbes context.CancelFunc // nil before OpenRoutes
	routed    chan struct{}

	mu     sync.Mutex
	direct []*gds.DirectRoute // of GPUs
}

// Open makes the file systems of roots that have one of their own, and loads the CUDA driver. It logs when there is none.
func Open(cfg *config.Config, log *slog.Logger) (*Devices, error) {
	d := &Devices{cfg: cfg, log: log, routed: make(chan struct{})}
	if err := errors.Join(d.openMemory(), d.openBuckets()); err != nil {
		return nil, errors.Join(err, d.CloseRoots())
	}
	if cfg.GDS.CUDA == config.CUDAOff {
		return d, nil
	}
	driver, err := gds.Open(log)
	if err != nil {
		reason := err
		if errors.Is(err, gds.ErrNoDriver) {
			reason = gds.ErrNoDriver // which file is missing where is of no use at each start
			log.Debug("the driver cannot be loaded", "error", err)
		}
		log.Info("no GPU in use; clients can register host memory only", "reason", reason)
		return d, nil
	}
	d.driver = driver
	return d, nil
}

// GPUs are the GPUs in use.
func (d *Devices) GPUs() []*gds.GPU { return d.gpus }

// OpenGPUs takes the machine's GPUs into use and adds them to the engine. One that cannot be used is logged and left
// out. Then it page-locks the memory of roots for them, and for others if there are; yields waits for what that would delay.
func (d *Devices) OpenGPUs(engine *transfer.Engine, yields func(), others ...staging.Pinner) error {
	if d.driver == nil {
		d.startMemory(nil, others, yields)
		return nil
	}
	devices, err := d.driver.Devices()
	if err != nil {
		return fmt.Errorf("list GPUs: %w", err)
	}
	places, nodes := d.numaNodes(staging.SystemTopology(), devices)
	d.placeStaging(engine, nodes)
	for _, dev := range devices {
		place, ok := places[dev.UUID]
		if !ok {
			place.ID = staging.NoNode
		}
		use := GPUConfig(d.cfg)
		use.CPUs = place.CPUs
		g, err := d.driver.OpenGPU(dev.UUID, use)
		if err != nil {
			d.log.Warn("GPU cannot be used", "gpu", dev.UUID.String(), "name", dev.Name, "error", err)
			continue
		}
		d.gpus = append(d.gpus, g)
		if err := engine.AddGPU(g); err != nil {
			d.log.Warn("copies to and from GPU will be slow", "gpu", dev.UUID.String(), "error", err)
		}
		d.log.Info("GPU in use", "gpu", dev.UUID.String(), "name", dev.Name, "pci", dev.PCI, "memory", dev.Memory,
			"cuda", d.driver.Version(), "copies", g.Mode().String(), "numa_node", place.ID)
	}
	d.startMemory(nodes, others, yields)
	return nil
}

// cuFileOperations is how many are in flight on a GPU, each on a thread of its own.
const cuFileOperations = 16

// idleHandles is how many files stay registered with cuFile while they are not in use. Each takes a descriptor.
const idleHandles = 256

// maxWindow is the largest window of a copy thread. Larger slots are no faster and take device memory from the model.
const maxWindow = 16 << 20

// GPUConfig is how a configuration uses a GPU.
func GPUConfig(c *config.Config) gds.Config {
	use := gds.Config{
		Threads: c.Engine.ThreadsPerGPU, Files: cuFileOperations,
		Window: int(c.Engine.SlotBytes), Codec: c.Compresses(),
	}
	if use.Codec {
		use.Window *= 2 // so that all that a slot has is decoded at a time: it takes hardly longer than half of it
	}
	use.Window = min(use.Window, maxWindow)
	return use
}

// Lost is why GPUs went out of service; nil while all are in service.
func (d *Devices) Lost() error {
	var errs []error
	for _, g := range d.gpus {
		errs = append(errs, g.Err())
	}
	return errors.Join(errs...)
}

// Close closes cuFile and then the GPUs. Nothing may use them any more. The file systems of roots remain until CloseRoots.
func (d *Devices) Close() error {
	errs := []error{d.unlockMemory(), d.closeDirect()}
	for _, g := range d.gpus {
		errs = append(errs, d.unlessHung(g.Close()))
	}
	return errors.Join(errs...)
}

// unlessHung logs the error of a GPU that hung storage keeps in use. The storage failed, not the host, and the memory
// goes with the process, so the host still closes without an error.
func (d *Devices) unlessHung(err error) error {
	if !errors.Is(err, gds.ErrHung) {
		return err
	}
	d.log.Warn("GPU left open: hung storage still uses its memory", "error", err)
	return nil
}
