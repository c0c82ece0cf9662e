package devices

import (
	"errors"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
)

// OpenFirst opens the first n GPUs without a host, as a configuration uses them.
func OpenFirst(c *config.Config, n int) (opened []*gds.GPU, err error) {
	if c.GDS.CUDA == config.CUDAOff {
		return nil, fmt.Errorf("%w: gds.cuda is off", gds.ErrNoDriver)
	}
	driver, err := gds.Open(nil)
	if err != nil {
		return nil, err
	}
	list, err := driver.Devices()
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: the machine has none", gds.ErrNoGPU)
	}
	if len(list) < n {
		return nil, fmt.Errorf("%w: %d of %d", ErrTooFew, len(list), n)
	}
	for _, d := range list[:n] {
		gpu, err := driver.OpenGPU(d.UUID, GPUConfig(c))
		if err != nil {
			for _, g := range opened {
				g.Close()
			}
			return nil, err
		}
		opened = append(opened, gpu)
	}
	return opened, nil
}

// OpenDirect loads cuFile for one GPU without a host. Each thread has a slot of device memory for files of the given size, so
// that no file is staged for lack of a slot. If the configuration forbids cuFile, there is no route.
func OpenDirect(c *config.Config, gpu *gds.GPU, fileBytes int64) (*gds.DirectRoute, error) {
	if !c.MayUseCuFile() {
		return nil, nil
	}
	lib, err := gds.LoadCuFile()
	if err != nil {
		return nil, err
	}
	_ = lib.Configure(os.TempDir()) // an older cuFile uses its own configuration
	if lost := gpu.DoFile(func(t *gds.Thread) { err = lib.Open(t) }); lost != nil || err != nil {
		return nil, errors.Join(lost, err)
	}
	_ = lib.StartStats() // an older cuFile has no statistics; the route is then not named
	room := max(c.GDS.MaxDeviceMemory, int64(c.Engine.ThreadsPerGPU)*fileBytes)
	return gds.NewDirectRoute(gpu, lib, gds.DirectConfig{BufferBytes: room, Handles: idleHandles})
}
