package sandbox

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Source is a module for [Compile]: scanned, checked, and with resolved limits.
type Source struct {
	Name     string
	Digest   string // SHA-256 of Bytes in hexadecimal
	Bytes    []byte
	Scan     *Scan
	Roles    [abi.Roles]bool
	Pages    uint32 // most pages of memory, of 64 KiB
	Limits   fuelLimits
	Counters int // number of counters in the manifest
	Log      *slog.Logger
	Cache    *Cache        // optional
	Compile  CompileLimits // limits of the compilation
	Profile  *Profile      // nil when the module serves requests

	CPUClock func() time.Duration // CPU time of the thread; nil for the real one
}

// Code is one opened module: its machine code, and the counters and log lines of its instances.
type Code struct {
	*machineCode
	name, digest string
	roles        [abi.Roles]bool
	pages        uint32
	limits       fuelLimits
	counters     []atomic.Int64
	log          *slog.Logger
	lines        logLimit
	closing      sync.WaitGroup // instances that are releasing their memory
	cpuClock     func() time.Duration
}

// Compile returns a module's compiled form, from the cache or by a child process, which is killed when ctx ends.
func Compile(ctx context.Context, src *Source) (*Code, error) {
	cache := src.Cache
	if cache == nil {
		cache = &Cache{}
	}
	m, err := cache.share(src.key(), func() (*machineCode, error) { return load(ctx, src, cache) })
	if err != nil {
		return nil, err
	}
	c := &Code{
		machineCode: m, name: src.Name, digest: src.Digest, roles: src.Roles, pages: src.Pages, limits: src.Limits,
		counters: make([]atomic.Int64, src.Counters), log: src.Log, cpuClock: src.CPUClock,
	}
	if c.cpuClock == nil {
		c.cpuClock = ThreadCPUTime
	}
	return c, nil
}

// load returns a module's machine code, from the cache's files or by a child process.
func load(ctx context.Context, src *Source, cache *Cache) (*machineCode, error) {
	entry := cache.entry(src)
	if wasm, refusal, ok := entry.verdict(); ok {
		if refusal != nil {
			return nil, refusal
		}
		m, err := newMachineCode(ctx, src, wasm, entry.dir)
		if err == nil || ctx.Err() != nil {
			return m, err
		}
		src.Log.Warn("cached machine code of policy unusable; compiling again", "error", err)
	}
	return build(ctx, src, cache, entry)
}

// build compiles a module in a child process and keeps the result.
func build(ctx context.Context, src *Source, cache *Cache, entry entry) (*machineCode, error) {
	dir, err := cache.workDir()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := os.RemoveAll(dir); err != nil {
			src.Log.Warn("directory of compilation not removed", "path", dir, "error", err)
		}
	}()
	src.Log.Info("compiling policy", "bytes", len(src.Bytes), "cached", entry.dir != "", "memory", src.Compile.Memory,
		"cpu", src.Compile.CPU.String(), "limit", src.Compile.Time.String())
	wasm, err := runCompiler(ctx, &compileJob{
		Wasm: src.Bytes, Pages: src.Pages, Limits: src.Compile, Calls: src.Profile != nil,
	}, dir)
	if isFinal(err) {
		entry.keep(nil, err, src.Log)
	}
	if err != nil {
		return nil, err
	}
	m, err := newMachineCode(ctx, src, wasm, dir)
	if err == nil && entry.takeCode(dir, src.Log) {
		entry.keep(wasm, nil, src.Log)
	}
	return m, err
}

// Scratch returns the same code for instances without log lines and counters. Call [Code.Wait] in place of Close.
func (c *Code) Scratch() *Code {
	return &Code{
		machineCode: c.machineCode, name: c.name, digest: c.digest, roles: c.roles, pages: c.pages, limits: c.limits,
		counters: make([]atomic.Int64, len(c.counters)), log: slog.New(slog.DiscardHandler),
		cpuClock: c.cpuClock,
	}
}

// Limits returns the fuel limits of the module's calls.
func (c *Code) Limits() *fuelLimits { return &c.limits }

// Counter returns the sum that the module's instances reported for its i-th counter.
func (c *Code) Counter(i int) int64 { return c.counters[i].Load() }

// Wait waits until closed instances have released their memory.
func (c *Code) Wait() { c.closing.Wait() }

// Close releases the code. All its instances must have been closed.
func (c *Code) Close(ctx context.Context) error {
	c.Wait()
	return c.give(ctx)
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
