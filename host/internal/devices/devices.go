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

// Devices holds the GPUs of a host, and the file systems of roots that are not directories. A host without GPUs is normal: it
// serves host memory.
type Devices struct {
	cfg    *config.Config
	log    *slog.Logger
	driver *gds.Driver // nil without GPUs
	gpus   []*gds.GPU
	cufile *gds.CuFile       // nil if everything is staged
	memory map[int]*memfs.FS // file systems of roots in memory, by root
	bucket map[int]*s3fs.FS  // file systems of roots in buckets, by root

	endProbes context.CancelFunc // nil before OpenRoutes
	routed    chan struct{}

	mu     sync.Mutex
	direct []*gds.DirectRoute // direct routes of the GPUs
}

// Open creates the file systems of roots that are not directories, and loads the CUDA driver. If there is no driver, it logs
// this and continues.
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
			reason = gds.ErrNoDriver // the names of the missing files are not useful at each start
			log.Debug("the driver cannot be loaded", "error", err)
		}
		log.Info("no GPU in use; clients can register host memory only", "reason", reason)
		return d, nil
	}
	d.driver = driver
	return d, nil
}

// GPUs returns the GPUs in use.
func (d *Devices) GPUs() []*gds.GPU { return d.gpus }

// OpenGPUs takes the machine's GPUs into use and adds them to the engine. A GPU that cannot be used is logged and left out.
// Then OpenGPUs page-locks the memory of roots for the GPUs, and for others if there are any. It calls yields before each step,
// to wait for the work that page-locking would delay.
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

// cuFileOperations is the number of cuFile operations in flight on a GPU. Each has a thread of its own.
const cuFileOperations = 16

// idleHandles is the maximum number of files that stay registered with cuFile while they are not in use. Each takes a
// descriptor.
const idleHandles = 256

// maxWindow is the largest window of a copy thread. Larger slots are no faster and take device memory from the model.
const maxWindow = 16 << 20

// GPUConfig returns the configuration of a GPU.
func GPUConfig(c *config.Config) gds.Config {
	use := gds.Config{
		Threads: c.Engine.ThreadsPerGPU, Files: cuFileOperations,
		Window: int(c.Engine.SlotBytes), Codec: c.Compresses(),
	}
	if use.Codec {
		use.Window *= 2 // so that a whole slot is decoded at a time, which takes hardly longer than half a slot
	}
	use.Window = min(use.Window, maxWindow)
	return use
}

// Lost returns the reason why GPUs are out of service, or nil if all are in service.
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
