package gds

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/gds/internal/kernels"
)

// kernel is a function of a loaded module. Both are 0 if it could not be loaded.
type kernel struct{ module, function uintptr }

// load compiles PTX for this GPU.
func (t *Thread) load(ptx, entry string) (k kernel, err error) {
	image := append([]byte(ptx), 0)
	if err := t.call(&t.gpu.driver.fn.moduleLoadData, t.outAt(0), startOf(image)); err != nil {
		return kernel{}, err
	}
	runtime.KeepAlive(image)
	return t.entry(uintptr(t.out[0]), entry)
}

// entry finds a kernel of a module.
func (t *Thread) entry(module uintptr, entry string) (k kernel, err error) {
	fn, name := &t.gpu.driver.fn, append([]byte(entry), 0)
	k.module = module
	if err := t.call(&fn.moduleGetFunction, t.outAt(0), k.module, startOf(name)); err != nil {
		return k, err
	}
	runtime.KeepAlive(name)
	k.function = uintptr(t.out[0])
	return k, nil
}

// kernelsAtOnce is the number of concurrent kernels with a speed that is limited by the bus. It is enough to keep the
// bus busy. With more kernels, each would have too few blocks: on an H200, 24 kernels with one block each moved a
// quarter less than 8 kernels with four.
const kernelsAtOnce = 8

// blockShare divides the configured thread blocks among the kernels in flight, apart from those on windows.
type blockShare struct {
	copying atomic.Int32  // kernels in flight
	slots   chan struct{} // one for each kernel in flight
}

// acquireBlocks waits for a slot and takes a share of all thread blocks, at most most of them. releaseBlocks returns
// it.
func (g *GPU) acquireBlocks(most int) int {
	g.blocks.slots <- struct{}{}
	return min(max(1, g.cfg.Blocks/int(g.blocks.copying.Add(1))), most)
}

func (g *GPU) releaseBlocks() {
	g.blocks.copying.Add(-1)
	<-g.blocks.slots
}

// start launches a kernel with the thread's parameters on its stream.
func (t *Thread) start(k kernel, blocks, threads int) error {
	for i := range t.params {
		t.paramAt[i] = uintptr(unsafe.Pointer(&t.params[i]))
	}
	return t.call(&t.gpu.driver.fn.launchKernel, k.function, uintptr(blocks), 1, 1, uintptr(threads), 1, 1, 0, t.stream,
		uintptr(unsafe.Pointer(&t.paramAt[0])), 0)
}

// loadKernels loads the copy kernel and the checksum kernel.
func (t *Thread) loadKernels() (err error) {
	g := t.gpu
	if g.kernels.sums, err = t.load(kernels.Sums, kernels.SumsEntry); err != nil {
		if Sticky(err) {
			return err
		}
		g.driver.log.Warn("checksum kernel unavailable, no direct route", "gpu", g.UUID.String(), "error", err)
	}
	g.kernels.pages, err = t.load(kernels.Pages, kernels.PagesEntry)
	return err
}
