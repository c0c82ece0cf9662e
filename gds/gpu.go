package gds

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// UUID identifies a GPU in every process, independent of their order of GPUs.
type UUID [16]byte

// String returns the form that nvidia-smi and HELLO use.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// ParseUUID reads a UUID, with or without the prefix "GPU-".
func ParseUUID(s string) (u UUID, err error) {
	h := strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(s), "gpu-"), "-", "")
	if len(h) != 2*len(u) {
		return u, fmt.Errorf("%w: %q is no UUID", ErrNoGPU, s)
	}
	if _, err := hex.Decode(u[:], []byte(h)); err != nil {
		return u, fmt.Errorf("%w: %q is no UUID", ErrNoGPU, s)
	}
	return u, nil
}

// Device describes a GPU that is not in use yet.
type Device struct {
	UUID    UUID
	Ordinal int // number in this process
	Name    string
	PCI     string // domain:bus:device.function, lower case
	Memory  int64  // total bytes
	SMs     int    // multiprocessors
	Major   int    // compute capability
	Minor   int
}

// Config configures a GPU.
type Config struct {
	Threads int // threads for copies; one more serves imports
	Files   int // threads for cuFile calls, which block as long as the storage does
	// Blocks is the number of thread blocks of all copy kernels together, which the engine's compute does not get. A
	// kernel on a window takes half.
	Blocks int
	Window int   // bytes of device memory per thread for copies; 0: none. See [Window]
	Codec  bool  // each window has a [Coder]
	Copy   Mode  // the first mode of copying pages
	CPUs   []int // CPUs to bind the threads to, if allowed; empty: any
	// Lost is called once when the GPU goes out of service. Optional.
	Lost func(*GPU, error)
}

// Defaults of Config.
const (
	DefaultThreads = 16
	DefaultBlocks  = 32
)

// pieceSlots is the most pieces of one kernel launch; a larger batch launches several.
const pieceSlots = 8192

// flagSlots is the most jobs that have a stop flag at a time.
const flagSlots = 1024

// flagStride puts each flag on its own cache line. haltedStride does the same for the halted words in device memory.
const (
	flagStride   = 64
	haltedStride = 128
)

// GPU is a device in use: its primary context, its threads and its kernels.
type GPU struct {
	Device
	driver  *Driver
	cfg     Config
	device  int32
	ctx     uintptr
	kernels struct{ pages, sums, encode, pack, decode, join kernel }

	threads  chan *Thread // idle threads for copies
	ready    int          // number of threads for copies
	files    *filePool    // threads for cuFile calls
	all      []*Thread
	control  *Thread // the thread for imports, so that they never wait behind transfers
	ctlMu    sync.Mutex
	shared   []byte // page-locked memory: stop flags, then each thread's pieces
	haltedAt uint64 // device address of the threads' halted words, haltedStride apart
	windows  threadMemory
	coders   threadMemory
	flags    flagPool
	mode     copyMode
	blocks   blockShare
	lost     atomic.Pointer[error]
	closed   chan struct{}
	once     sync.Once

	mu      sync.Mutex
	imports map[[ipcHandleBytes]byte]*Import
}

// Devices lists the GPUs that this process sees.
func (d *Driver) Devices() ([]Device, error) {
	var n int32
	if err := d.call(d.fn.deviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	out := make([]Device, n)
	for i := range out {
		if err := d.describe(i, &out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (d *Driver) describe(ordinal int, out *Device) error {
	var device int32
	if err := d.call(d.fn.deviceGet, uintptr(unsafe.Pointer(&device)), uintptr(ordinal)); err != nil {
		return err
	}
	out.Ordinal = ordinal
	if err := d.call(d.fn.deviceGetUUID, uintptr(unsafe.Pointer(&out.UUID)), uintptr(device)); err != nil {
		return err
	}
	text := make([]byte, 256)
	if err := d.call(d.fn.deviceGetName, uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)),
		uintptr(device)); err != nil {
		return err
	}
	out.Name = unix.ByteSliceToString(text)
	if err := d.call(d.fn.deviceGetPCIBusID, uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)),
		uintptr(device)); err != nil {
		return err
	}
	out.PCI = strings.ToLower(unix.ByteSliceToString(text))
	if err := d.call(d.fn.deviceTotalMem, uintptr(unsafe.Pointer(&out.Memory)), uintptr(device)); err != nil {
		return err
	}
	const multiprocessors, major, minor = 16, 75, 76
	for _, a := range []struct {
		attribute uintptr
		to        *int
	}{{multiprocessors, &out.SMs}, {major, &out.Major}, {minor, &out.Minor}} {
		var v int32
		if err := d.call(d.fn.deviceGetAttribute, uintptr(unsafe.Pointer(&v)), a.attribute,
			uintptr(device)); err != nil {
			return err
		}
		*a.to = int(v)
	}
	return nil
}

// OpenGPU starts to use a GPU.
func (d *Driver) OpenGPU(uuid UUID, cfg Config) (_ *GPU, err error) {
	devices, err := d.Devices()
	if err != nil {
		return nil, err
	}
	for _, dev := range devices {
		if dev.UUID == uuid {
			return d.openGPU(dev, cfg)
		}
	}
	return nil, fmt.Errorf("%w: %s", ErrNoGPU, uuid)
}

func (d *Driver) openGPU(dev Device, cfg Config) (_ *GPU, err error) {
	if cfg.Threads == 0 {
		cfg.Threads = DefaultThreads
	}
	if cfg.Blocks == 0 {
		cfg.Blocks = DefaultBlocks
	}
	if cfg.Threads < 1 || cfg.Threads > 1024 || cfg.Files < 0 || cfg.Files > 1024 || cfg.Blocks < 1 ||
		cfg.Blocks > 4096 || cfg.Window < 0 || cfg.Window > 1<<30 {
		return nil, fmt.Errorf("%w: %d and %d threads, %d thread blocks, windows of %d bytes", ErrConfig, cfg.Threads,
			cfg.Files, cfg.Blocks, cfg.Window)
	}
	g := &GPU{
		Device: dev, driver: d, cfg: cfg, closed: make(chan struct{}),
		threads: make(chan *Thread, cfg.Threads), imports: map[[ipcHandleBytes]byte]*Import{},
	}
	g.blocks.slots, g.flags.free = make(chan struct{}, kernelsAtOnce), make(chan *Flag, flagSlots)
	g.files = newFilePool(g, cfg.Files)
	g.mode.current.Store(int32(cfg.Copy))
	if err := d.call(d.fn.deviceGet, uintptr(unsafe.Pointer(&g.device)), uintptr(dev.Ordinal)); err != nil {
		return nil, err
	}
	if err := d.call(d.fn.primaryCtxRetain, uintptr(unsafe.Pointer(&g.ctx)), uintptr(g.device)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	perThread := pieceSlots*int(unsafe.Sizeof(Piece{})) + 2*windowTables
	g.shared, err = unix.Mmap(-1, 0, flagSlots*flagStride+(cfg.Threads+cfg.Files+1)*perThread,
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("gds: map memory for commands: %w", err)
	}
	for i := range cfg.Threads + cfg.Files + 1 {
		t := &Thread{}
		if i >= cfg.Threads {
			t = d.acquireThread()
		}
		g.all = append(g.all, t)
		at := flagSlots*flagStride + i*perThread
		t.do(func(t *Thread) { err = t.bind(g, g.shared[at:at+perThread]) })
		if err != nil {
			return nil, err
		}
	}
	g.control = g.all[cfg.Threads+cfg.Files]
	if err := g.Control((*Thread).prepare); err != nil {
		return nil, err
	}
	for i, t := range g.all[:cfg.Threads+cfg.Files] {
		if i < cfg.Threads {
			g.threads <- t
			g.ready++
		} else {
			g.files.add(t)
		}
	}
	return g, nil
}

// prepare registers the command memory and loads the kernels. Without them, pages are copied in slower modes.
func (t *Thread) prepare() error {
	g := t.gpu
	if err := t.register(g.shared); err != nil {
		return err
	}
	bytes := uintptr(len(g.all) * haltedStride)
	if err := t.call(&g.driver.fn.memAlloc, t.outAt(0), bytes); err != nil {
		return err
	}
	g.haltedAt = t.out[0]
	if err := t.Fill(g.haltedAt, 0, int64(bytes)); err != nil {
		return err
	}
	for i, other := range g.all {
		other.halted, other.epoch = g.haltedAt+uint64(i*haltedStride), 0
	}
	g.flags.never = &Flag{word: (*atomic.Uint32)(unsafe.Pointer(&g.shared[0]))}
	for i := 1; i < flagSlots; i++ {
		g.flags.free <- &Flag{word: (*atomic.Uint32)(unsafe.Pointer(&g.shared[i*flagStride])), pool: g.flags.free}
	}
	err := t.loadKernels()
	if lost := errors.Join(t.makeWindows(), t.makeCoders()); lost != nil {
		return lost
	}
	if err != nil && !Sticky(err) {
		g.driver.log.Warn("copy kernel unavailable, using the copy engines", "gpu", g.UUID.String(), "error", err)
		if g.Mode() == Kernel {
			g.mode.current.Store(int32(SingleCopy))
		}
		return nil
	}
	return err
}

// acquireThread returns a parked thread, or a new one.
func (d *Driver) acquireThread() *Thread {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.parked); n > 0 {
		t := d.parked[n-1]
		d.parked = d.parked[:n-1]
		return t
	}
	return newThread()
}

// markLost takes the GPU out of service.
func (g *GPU) markLost(cause error) {
	err := fmt.Errorf("%w: %s: %w", ErrLost, g.UUID, cause)
	if g.lost.CompareAndSwap(nil, &err) {
		g.driver.log.Error("GPU out of service: its context is lost, restart kvhost to use it again",
			"gpu", g.UUID.String(), "error", cause)
		if g.cfg.Lost != nil {
			go g.cfg.Lost(g, err)
		}
	}
}

// Err returns the error that took the GPU out of service, or nil.
func (g *GPU) Err() error {
	if p := g.lost.Load(); p != nil {
		return *p
	}
	return nil
}

// Close waits for running work, closes the remaining imports, and releases the context. The driver keeps the threads
// for its next GPU. If abandoned operations still run, the GPU is left open and the error is an [ErrHung].
func (g *GPU) Close() (err error) {
	g.once.Do(func() { err = g.close() })
	return err
}

func (g *GPU) close() error {
	close(g.closed)
	for range g.ready {
		<-g.threads
	}
	if hung := g.files.drain(); hung > 0 { // their memory and context must stay
		return fmt.Errorf("%w: %d operations have not returned, GPU %s stays open", ErrHung, hung, g.UUID)
	}
	g.ctlMu.Lock()
	defer g.ctlMu.Unlock()
	var errs []error
	if g.control != nil {
		g.control.do(func(t *Thread) { errs = append(errs, t.release()) })
	}
	g.mu.Lock()
	all := g.all
	g.mu.Unlock()
	for _, t := range all {
		if t.gpu == g {
			t.do(func(t *Thread) { errs = append(errs, t.unbind()) })
		}
	}
	if g.shared != nil {
		errs = append(errs, unix.Munmap(g.shared))
	}
	errs = append(errs, g.driver.call(g.driver.fn.primaryCtxRelease, uintptr(g.device)))
	g.driver.mu.Lock()
	for _, t := range all {
		if t.tasks != nil {
			g.driver.parked = append(g.driver.parked, t)
		}
	}
	g.driver.mu.Unlock()
	if g.Err() != nil {
		return nil // a lost context fails every call
	}
	return errors.Join(errs...)
}

// release frees the thread's resources in the context.
func (t *Thread) release() error {
	g := t.gpu
	g.mu.Lock()
	left := make([]*Import, 0, len(g.imports))
	for _, m := range g.imports {
		left = append(left, m)
	}
	clear(g.imports)
	g.mu.Unlock()
	var errs []error
	for _, m := range left {
		errs = append(errs, t.call(&g.driver.fn.ipcCloseMemHandle, uintptr(m.Base)))
	}
	for _, at := range [...]uint64{g.haltedAt, g.windows.at, g.coders.at} {
		if at != 0 {
			errs = append(errs, t.call(&g.driver.fn.memFree, uintptr(at)))
		}
	}
	for _, k := range [...]kernel{g.kernels.pages, g.kernels.sums, g.kernels.encode} {
		if k.module != 0 {
			errs = append(errs, t.call(&g.driver.fn.moduleUnload, k.module))
		}
	}
	return errors.Join(append(errs, t.unregister(g.shared))...)
}
