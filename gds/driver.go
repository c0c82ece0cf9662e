package gds

import (
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Driver is libcuda, initialised. There is at most one per library and process. It is never closed.
type Driver struct {
	lib     *library
	fn      cudaFunctions
	version int
	log     *slog.Logger

	mu     sync.Mutex
	pinned []pinnedRange
	parked []*Thread // threads of closed GPUs
}

// cudaFunctions are the functions in use, by subject.
type cudaFunctions struct {
	init, driverGetVersion                                        function
	deviceGetCount, deviceGet, deviceGetName, deviceGetUUID       function
	deviceGetAttribute, deviceTotalMem, deviceGetPCIBusID         function
	primaryCtxRetain, primaryCtxRelease, ctxSetCurrent            function
	streamWriteValue64                                            function
	streamCreate, streamDestroy                                   function
	eventCreate, eventDestroy, eventRecord, eventSynchronize      function
	memAlloc, memFree, memGetAddressRange, pointerGetAttribute    function
	memHostRegister, memHostUnregister, memHostGetDevicePointer   function
	memcpyAsync, memsetD8Async                                    function
	moduleLoadData, moduleGetFunction, moduleUnload, launchKernel function
	ipcGetMemHandle, ipcOpenMemHandle, ipcCloseMemHandle          function
}

func (c *cudaFunctions) required() map[string]*function {
	return map[string]*function{
		"cuInit":                       &c.init,
		"cuDriverGetVersion":           &c.driverGetVersion,
		"cuDeviceGetCount":             &c.deviceGetCount,
		"cuDeviceGet":                  &c.deviceGet,
		"cuDeviceGetName":              &c.deviceGetName,
		"cuDeviceGetUuid_v2":           &c.deviceGetUUID,
		"cuDeviceGetAttribute":         &c.deviceGetAttribute,
		"cuDeviceTotalMem_v2":          &c.deviceTotalMem,
		"cuDeviceGetPCIBusId":          &c.deviceGetPCIBusID,
		"cuDevicePrimaryCtxRetain":     &c.primaryCtxRetain,
		"cuDevicePrimaryCtxRelease_v2": &c.primaryCtxRelease,
		"cuCtxSetCurrent":              &c.ctxSetCurrent,
		"cuStreamCreate":               &c.streamCreate,
		"cuStreamDestroy_v2":           &c.streamDestroy,
		"cuEventCreate":                &c.eventCreate,
		"cuEventDestroy_v2":            &c.eventDestroy,
		"cuEventRecord":                &c.eventRecord,
		"cuEventSynchronize":           &c.eventSynchronize,
		"cuMemAlloc_v2":                &c.memAlloc,
		"cuMemFree_v2":                 &c.memFree,
		"cuMemGetAddressRange_v2":      &c.memGetAddressRange,
		"cuPointerGetAttribute":        &c.pointerGetAttribute,
		"cuMemHostRegister_v2":         &c.memHostRegister,
		"cuMemHostUnregister":          &c.memHostUnregister,
		"cuMemHostGetDevicePointer_v2": &c.memHostGetDevicePointer,
		"cuMemcpyAsync":                &c.memcpyAsync,
		"cuMemsetD8Async":              &c.memsetD8Async,
		"cuModuleLoadData":             &c.moduleLoadData,
		"cuModuleGetFunction":          &c.moduleGetFunction,
		"cuModuleUnload":               &c.moduleUnload,
		"cuLaunchKernel":               &c.launchKernel,
		"cuIpcGetMemHandle":            &c.ipcGetMemHandle,
		"cuIpcOpenMemHandle_v2":        &c.ipcOpenMemHandle,
		"cuIpcCloseMemHandle":          &c.ipcCloseMemHandle,
	}
}

// optional lists the functions that older drivers lack; copies work without them.
func (c *cudaFunctions) optional() map[string]*function {
	return map[string]*function{"cuStreamWriteValue64_v2 cuStreamWriteValue64": &c.streamWriteValue64}
}

// A GPU's streams share the driver's queues. There are 8, unless the environment sets another number before the driver
// is initialised. Work in one queue starts in order, so threads that share a queue would wait for each other.
const (
	queuesEnv  = "CUDA_DEVICE_MAX_CONNECTIONS"
	mostQueues = "32"
)

// Libcuda lists the names of libcuda, in the order in which they are tried.
var Libcuda = []string{"libcuda.so.1", "libcuda.so"}

// Open loads and initialises the CUDA driver from the first of the given files that loads, by default from
// [Libcuda].
func Open(log *slog.Logger, names ...string) (*Driver, error) {
	if len(names) == 0 {
		names = Libcuda
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	lib, err := load(names, ErrNoDriver)
	if err != nil {
		return nil, err
	}
	d := &Driver{lib: lib, log: log}
	if err := lib.resolve(d.fn.required(), d.fn.optional()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	if err := SetDefault(queuesEnv, mostQueues); err != nil {
		log.Warn("copies of many threads wait for each other", "error", err)
	}
	if err := d.call(d.fn.init, 0); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	var version int32
	if err := d.call(d.fn.driverGetVersion, uintptr(unsafe.Pointer(&version))); err != nil {
		return nil, err
	}
	d.version = int(version)
	return d, nil
}

// Version is the driver's CUDA version, as 1000*major + 10*minor.
func (d *Driver) Version() int { return d.version }

// call makes a call that needs no context, on any goroutine.
//
//go:uintptrescapes
func (d *Driver) call(f function, args ...uintptr) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if f.addr == 0 {
		return fmt.Errorf("%w: %s", ErrSymbol, f.name)
	}
	r, _, _ := purego.SyscallN(f.addr, args...)
	if code := Result(int32(r)); code != 0 {
		return &Error{f.name, code}
	}
	return nil
}
