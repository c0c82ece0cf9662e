package devices

import (
	"errors"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
)

// OpenFirst opens the first GPU alone, as a configuration uses it.
func OpenFirst(c *config.Config) (*gds.GPU, error) {
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
	return driver.OpenGPU(list[0].UUID, GPUConfig(c))
}

// OpenDirect loads cuFile for a GPU alone. Each thread has a slot of device memory for files of so many bytes, so that none
// is staged for lack of one. Where the configuration forbids cuFile there is no route.
func OpenDirect(c *config.Config, gpu *gds.GPU, fileBytes int64) (*gds.DirectRoute, error) {
	if !c.MayUseCuFile() {
		return nil, nil
	}
	lib, err := gds.LoadCuFile()
	if err != nil {
		return nil, err
	}
	_ = lib.Configure(os.TempDir()) // an older cuFile keeps its own configuration
	if lost := gpu.DoFile(func(t *gds.Thread) { err = lib.Open(t) }); lost != nil || err != nil {
		return nil, errors.Join(lost, err)
	}
	_ = lib.StartStats() // an older cuFile has none; then the route is not named
	room := max(c.GDS.MaxDeviceMemory, int64(c.Engine.ThreadsPerGPU)*fileBytes)
	return gds.NewDirectRoute(gpu, lib, gds.DirectConfig{BufferBytes: room, Handles: idleHandles})
}
