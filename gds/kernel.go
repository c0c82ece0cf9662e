package gds

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/gds/kernels"
)

// kernel is a function of a loaded module; both are 0 where it could not be loaded.
type kernel struct{ module, function uintptr }

// load has the driver compile PTX for this GPU.
func (t *Thread) load(ptx, entry string) (k kernel, err error) {
	fn := &t.gpu.driver.fn
	image, name := append([]byte(ptx), 0), append([]byte(entry), 0)
	if err := t.call(&fn.moduleLoadData, t.outAt(0), startOf(image)); err != nil {
		return kernel{}, err
	}
	runtime.KeepAlive(image)
	k.module = uintptr(t.out[0])
	if err := t.call(&fn.moduleGetFunction, t.outAt(0), k.module, startOf(name)); err != nil {
		return k, err
	}
	runtime.KeepAlive(name)
	k.function = uintptr(t.out[0])
	return k, nil
}

// kernelsAtOnce is how many kernels that are bound by the bus run at a time. So many keep it busy; of more, each
// would have fewer blocks and not get on: on an H200 24 kernels with a block each moved a quarter less than 8 with
// four.
const kernelsAtOnce = 8

// blockShare divides the configured thread blocks among the kernels in flight, apart from those on windows.
type blockShare struct {
	copying atomic.Int32  // kernels in flight
	slots   chan struct{} // one for each of them
}

// share waits for a turn and takes a share of the thread blocks that all kernels in flight have together, at most
// most of them. The caller gives it back with unshare.
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

// loadKernels loads the copy kernel, and the checksum kernel that only the direct route needs.
func (t *Thread) loadKernels() (err error) {
	g := t.gpu
	if g.kernels.sums, err = t.load(kernels.Sums, kernels.SumsEntry); err != nil {
		if Sticky(err) {
			return err
		}
		g.driver.log.Warn("the checksum kernel cannot be used, nothing goes the direct route", "gpu", g.UUID.String(),
			"error", err)
	}
	g.kernels.pages, err = t.load(kernels.Pages, kernels.PagesEntry)
	return err
}
