package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/policy/meter"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// Source is a module as [Compile] takes it: scanned, checked, and with its limits resolved.
type Source struct {
	Name     string
	Digest   string // SHA-256 of Bytes in hexadecimal
	Bytes    []byte
	Scan     *Scan
	Roles    [abi.Roles]bool
	Pages    uint32 // most pages of memory, of 64 KiB
	Limits   FuelLimits
	Counters int // that the manifest names
	Log      *slog.Logger
	Cache    *Cache // optional

	Unmetered bool                 // count no fuel; for benchmarks, as the baseline
	CPUClock  func() time.Duration // CPU time of the thread; nil for the real one
}

// Code is a module's compiled form in a runtime of its own.
type Code struct {
	name, digest string
	runtime      wazero.Runtime
	compiled     wazero.CompiledModule
	cache        wazero.CompilationCache // nil without files
	roles        [abi.Roles]bool
	pages        uint32
	limits       FuelLimits
	counters     []atomic.Int64
	log          *slog.Logger
	lines        logLimit
	closing      sync.WaitGroup // instances that release their memory
	unmetered    bool
	cpuClock     func() time.Duration
}

// Compile compiles a module, by way of the cache if there is one.
func Compile(ctx context.Context, src *Source) (*Code, error) {
	cache := src.Cache
	if cache == nil {
		cache = &Cache{}
	}
	unlock, err := cache.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	bytes := src.Bytes
	if !src.Unmetered {
		if bytes, err = metered(ctx, src, cache); err != nil {
			return nil, err
		}
	}
	c, err := newCode(ctx, src, bytes, cache.dir)
	if err != nil && cache.dir != "" && ctx.Err() == nil { // the machine code may be damaged
		src.Log.Warn("cached machine code of policy unusable; compiling again", "error", err)
		return newCode(ctx, src, bytes, "")
	}
	return c, err
}

// metered is the module with fuel counting injected, within limits that bound the work of a compiler. The original is
// validated too: a module that names what the meter adds would become valid by the injection and could refill its own
// fuel. The interpreter validates at a tenth of the compiler's cost; its compiled form is thrown away.
func metered(ctx context.Context, src *Source, cache *Cache) ([]byte, error) {
	if out, refusal, ok := cache.verdict(src.Digest, src.Pages); ok {
		return out, refusal
	}
	out, err := metering.Inject(src.Bytes, metering.DefaultLimits())
	if err == nil {
		config := wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(src.Pages).WithDebugInfoEnabled(false)
		r := wazero.NewRuntimeWithConfig(ctx, config)
		_, err = r.CompileModule(ctx, src.Bytes)
		err = errors.Join(err, r.Close(ctx))
	}
	if ctx.Err() == nil {
		cache.keep(src.Digest, src.Pages, out, err, src.Log)
	}
	return out, err
}

// newCode makes a runtime for one module, because modules must not see each other's memory and exports. wazero keeps
// what it compiled in memory for as long as its cache is open, so each module has its own cache over the shared files.
func newCode(ctx context.Context, src *Source, bytes []byte, dir string) (*Code, error) {
	config := wazero.NewRuntimeConfigCompiler().WithMemoryLimitPages(src.Pages).WithDebugInfoEnabled(false)
	c := &Code{
		name: src.Name, digest: src.Digest, roles: src.Roles, pages: src.Pages, limits: src.Limits,
		counters: make([]atomic.Int64, src.Counters), log: src.Log, unmetered: src.Unmetered, cpuClock: src.CPUClock,
	}
	if c.cpuClock == nil {
		c.cpuClock = ThreadCPUTime
	}
	if dir != "" {
		var err error
		if c.cache, err = wazero.NewCompilationCacheWithDir(dir); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCache, err)
		}
		config = config.WithCompilationCache(c.cache)
	}
	c.runtime = wazero.NewRuntimeWithConfig(ctx, config)
	err := c.link(ctx, src.Scan)
	if err == nil {
		workers := experimental.WithCompilationWorkers(withRefueler(ctx), runtime.GOMAXPROCS(0))
		c.compiled, err = c.runtime.CompileModule(workers, bytes)
	}
	if err != nil {
		_ = c.release(ctx) // the first error is the one that matters
		return nil, err
	}
	return c, nil
}

// link provides the functions that the module imports. They were checked before.
func (c *Code) link(ctx context.Context, scan *Scan) error {
	builders := map[string]wazero.HostModuleBuilder{}
	done := map[[2]string]bool{}
	for _, i := range scan.imports {
		if done[[2]string{i.module, i.name}] {
			continue
		}
		done[[2]string{i.module, i.name}] = true
		if builders[i.module] == nil {
			builders[i.module] = c.runtime.NewHostModuleBuilder(i.module)
		}
		f := hostFunctions[i.module][i.name]
		builders[i.module].NewFunctionBuilder().
			WithGoModuleFunction(api.GoModuleFunc(f.Call), wasmTypes(f.params), wasmTypes(f.results)).Export(i.name)
	}
	for module, b := range builders {
		if _, err := b.Instantiate(ctx); err != nil {
			return fmt.Errorf("cannot provide %s: %w", module, err)
		}
	}
	return nil
}

// Scratch is the same code for instances whose log lines and counters are discarded. It is not closed but waited for,
// with [Code.Wait].
func (c *Code) Scratch() *Code {
	return &Code{
		name: c.name, digest: c.digest, runtime: c.runtime, compiled: c.compiled, roles: c.roles, pages: c.pages,
		limits: c.limits, counters: make([]atomic.Int64, len(c.counters)), log: slog.New(slog.DiscardHandler),
		unmetered: c.unmetered, cpuClock: c.cpuClock,
	}
}

// Limits are the fuel limits of the module's calls.
func (c *Code) Limits() *FuelLimits { return &c.limits }

// Counter is the sum that the module's instances reported for its i-th counter.
func (c *Code) Counter(i int) int64 { return c.counters[i].Load() }

// Wait waits until closed instances have released their memory.
func (c *Code) Wait() { c.closing.Wait() }

// Close releases the code. All its instances must have been closed.
func (c *Code) Close(ctx context.Context) error {
	c.Wait()
	return c.release(ctx)
}

func (c *Code) release(ctx context.Context) error {
	err := c.runtime.Close(ctx)
	if c.cache != nil {
		err = errors.Join(err, c.cache.Close(ctx))
	}
	return err
}

// wazeroVersion is the version of the compiler, which is also the validator.
var wazeroVersion = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == "github.com/tetratelabs/wazero" {
				return d.Version
			}
		}
	}
	return "unknown"
})
