package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/policy/meter"
	"github.com/kvhost/kvhost/plugins/dist"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// defaultPages bounds a module that does not say what it needs: 64 MiB.
const defaultPages = 1024

// code is a module's compiled form in a runtime of its own.
type code struct {
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	cache    wazero.CompilationCache // nil without files
	scan     *scan
	counters []atomic.Int64
	fuel     budgets

	unmetered bool
}

func (c *code) close(ctx context.Context) error {
	err := c.runtime.Close(ctx)
	if c.cache != nil {
		err = errors.Join(err, c.cache.Close(ctx))
	}
	return err
}

// Open loads a module: a path to a .wasm file, or the name of an embedded policy with or without ".wasm".
func Open(ctx context.Context, name string, opt Options) (*Module, error) {
	f, err := read(name, opt.Dir)
	if err != nil {
		return nil, err
	}
	return load(ctx, name, f, opt)
}

// file is a module as it was found.
type file struct {
	path   string // empty for an embedded policy
	bytes  []byte
	digest string // SHA-256 in hexadecimal
}

func newFile(path string, b []byte) *file { return &file{path, b, digestOf(b)} }

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// read finds a module's bytes. What looks like a path is one; a bare name is looked up in the working directory, in dir
// and among the embedded policies, in this order.
func read(name, dir string) (*file, error) {
	places := []string{name}
	bare := filepath.Base(name) == name
	if bare && dir != "" {
		places = append(places, filepath.Join(dir, strings.TrimSuffix(name, ".wasm")+".wasm"))
	}
	for _, path := range places {
		if bare && path == name && !strings.HasSuffix(name, ".wasm") {
			continue // "lru" is a name, and a directory may be called so
		}
		b, err := readFile(path)
		if err == nil {
			return newFile(path, b), nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("policy: cannot read %s: %w", name, err)
		}
	}
	if bare {
		if b, err := dist.Read(name); err == nil {
			return newFile("", b), nil
		}
		names := "none; `make` builds them"
		if n := dist.Names(); len(n) > 0 {
			names = strings.Join(n, ", ")
		}
		return nil, fmt.Errorf("%w: %s is neither a file nor an embedded policy (embedded: %s)", ErrNotFound, name, names)
	}
	return nil, fmt.Errorf("%w: no file %s", ErrNotFound, name)
}

// readFile reads no more than a module may have, and a byte.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxModuleBytes+1))
}

func load(ctx context.Context, name string, f *file, opt Options) (*Module, error) {
	m, s, pages, err := examine(name, f, &opt)
	if err != nil {
		return nil, refused(name, err)
	}
	if m.code, err = m.compile(ctx, f.bytes, pages, s, &opt); err != nil {
		return nil, refused(name, err)
	}
	m.code.fuel, m.code.unmetered = opt.Fuel.budgets(m.manifest.Fuel), opt.unmetered
	m.code.counters = make([]atomic.Int64, len(m.manifest.Counters))
	if m.roles[abi.RolePlace] {
		m.source = source{f.bytes, Pin{f.digest, opt.Grants, opt.MemoryPages, opt.Fuel}}
	}
	if opt.Untried {
		return m, nil
	}
	trial := m.trial(pages, !opt.unmetered)
	if opt.Cache.tried(trial) {
		return m, nil
	}
	if err := m.canary(ctx); err != nil {
		return nil, errors.Join(refused(name, err), m.Close(ctx))
	}
	opt.Cache.passed(trial, m.log)
	return m, nil
}

// refused is why a module is not loaded.
func refused(name string, err error) error {
	if errors.Is(err, ErrGrant) {
		return fmt.Errorf("%w (module %s)", err, name)
	}
	return fmt.Errorf("%w: %s: %w", ErrBadModule, name, err)
}

// examine judges what can be judged of a module before it is compiled, and says how many pages of memory it may have.
func examine(name string, f *file, opt *Options) (*Module, *scan, uint32, error) {
	m := &Module{name: bareName(name), digest: f.digest, log: opt.Log}
	m.guard.onFault, m.guard.stop = opt.OnFault, opt.Stop
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if err := pinned(f, opt); err != nil {
		return nil, nil, 0, err
	}
	s, err := scanModule(f.bytes)
	if err != nil {
		return nil, nil, 0, err
	}
	if m.roles, err = s.verify(); err != nil {
		return nil, nil, 0, err
	}
	if err := m.describe(s); err != nil {
		return nil, nil, 0, err
	}
	m.log = m.log.With("policy", m.name)
	if err := s.grants(m.manifest, opt.Grants); err != nil {
		return nil, nil, 0, err
	}
	pages := memoryPages(m.manifest, opt.MemoryPages)
	if least := s.memories[0].min; least > uint64(pages) {
		return nil, nil, 0, fmt.Errorf("its memory starts at %d pages of 64 KiB, the limit is %d: raise memory_pages in the manifest or the configuration", least, pages)
	}
	return m, s, pages, nil
}

// bareName is what a module without a manifest is called.
func bareName(name string) string { return strings.TrimSuffix(filepath.Base(name), ".wasm") }

// pinned says whether the module is the one, or by the hand, that the operator wants.
func pinned(f *file, opt *Options) error {
	if opt.SHA256 != "" && !strings.EqualFold(opt.SHA256, f.digest) {
		return fmt.Errorf("%w: its SHA-256 is %s, the configuration wants %s", ErrDigest, f.digest, opt.SHA256)
	}
	if opt.PublicKey != "" {
		return verifySignature(opt.PublicKey, f)
	}
	return nil
}

// memoryPages is the most that a module's memory may have.
func memoryPages(manifest abi.Manifest, most uint32) uint32 {
	pages := manifest.MemoryPages
	if pages == 0 {
		pages = defaultPages
	}
	if most != 0 {
		pages = min(pages, most)
	}
	return min(pages, abi.MaxMemoryPages)
}

// describe takes the module's manifest, or makes one of what the exports say.
func (m *Module) describe(s *scan) error {
	var exported []string
	for r, has := range m.roles {
		if has {
			exported = append(exported, abi.Role(r).String())
		}
	}
	if s.manifest == nil {
		m.manifest = abi.Manifest{Name: m.name, ABI: abi.Version, Roles: exported}
		return nil
	}
	manifest, err := abi.ParseManifest(s.manifest)
	if err != nil {
		return err
	}
	if err := manifest.Runs(abi.Release); err != nil {
		return err
	}
	for _, r := range manifest.Roles {
		if role, err := abi.ParseRole(r); err != nil || !m.roles[role] {
			return fmt.Errorf("its manifest names role %s, its exports do not have it (they have: %s)", r, strings.Join(exported, ", "))
		}
	}
	if len(manifest.Roles) != len(exported) {
		return fmt.Errorf("its manifest names the roles %s, its exports have %s", strings.Join(manifest.Roles, ", "), strings.Join(exported, ", "))
	}
	if _, saves := s.exports[abi.ExportSave]; manifest.StateFormat != "" && !saves {
		return fmt.Errorf("its manifest names the state format %q, its exports do not have %s and %s", manifest.StateFormat, abi.ExportSave, abi.ExportLoad)
	}
	m.manifest, m.name, m.known = manifest, manifest.Name, true
	return nil
}

// compile takes a module's bytes to code in a runtime of its own: by way of the cache, if there is one.
func (m *Module) compile(ctx context.Context, bytes []byte, pages uint32, s *scan, opt *Options) (*code, error) {
	c := opt.Cache
	if c == nil {
		c = &Cache{}
	}
	unlock, err := c.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if !opt.unmetered {
		if bytes, err = m.metered(ctx, bytes, pages, c); err != nil {
			return nil, err
		}
	}
	out, err := newCode(ctx, bytes, pages, s, c.dir)
	if err != nil && c.dir != "" && ctx.Err() == nil { // the machine code may be damaged
		m.log.Warn("a compiled policy cannot be used; it is compiled anew", "error", err)
		return newCode(ctx, bytes, pages, s, "")
	}
	return out, err
}

// metered gives the form of a module that counts what it executes, and is within limits that keep a compiler from doing
// without end. The original is validated too, because a module that names what the meter adds would be valid only
// afterwards, and could refill itself. The interpreter does this at a tenth of the compiler's price; its own form of the
// code is thrown away.
func (m *Module) metered(ctx context.Context, bytes []byte, pages uint32, c *Cache) ([]byte, error) {
	if out, refused, ok := c.verdict(m.digest, pages); ok {
		return out, refused
	}
	out, err := metering.Inject(bytes, metering.DefaultLimits())
	if err == nil {
		r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(pages).WithDebugInfoEnabled(false))
		_, err = r.CompileModule(ctx, bytes)
		err = errors.Join(err, r.Close(ctx))
	}
	if ctx.Err() == nil {
		c.keep(m.digest, pages, out, err, m.log)
	}
	return out, err
}

// newCode makes a runtime for one module: modules must not see each other's memory and exports. What wazero keeps of a module
// in memory it keeps for as long as its cache is open, so each has its own cache, which knows the files of all.
func newCode(ctx context.Context, bytes []byte, pages uint32, s *scan, dir string) (*code, error) {
	config := wazero.NewRuntimeConfigCompiler().WithMemoryLimitPages(pages).WithDebugInfoEnabled(false)
	c := &code{scan: s}
	if dir != "" {
		var err error
		if c.cache, err = wazero.NewCompilationCacheWithDir(dir); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCache, err)
		}
		config = config.WithCompilationCache(c.cache)
	}
	c.runtime = wazero.NewRuntimeWithConfig(ctx, config)
	err := c.link(ctx)
	if err == nil {
		c.compiled, err = c.runtime.CompileModule(experimental.WithCompilationWorkers(withRefueler(ctx), runtime.GOMAXPROCS(0)), bytes)
	}
	if err != nil {
		_ = c.close(ctx) // the first error is the one that matters
		return nil, err
	}
	return c, nil
}

// wazeroVersion is the compiler's, which is also the validator's.
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

// link offers the functions that the module imports; they were checked before.
func (c *code) link(ctx context.Context) error {
	builders := map[string]wazero.HostModuleBuilder{}
	done := map[[2]string]bool{}
	for _, i := range c.scan.imports {
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
			return fmt.Errorf("cannot offer %s: %w", module, err)
		}
	}
	return nil
}

// Counters are the sums that the module's instances reported through counter_add, by the manifest's names.
func (m *Module) Counters() map[string]int64 {
	if m.code == nil || len(m.code.counters) == 0 {
		return nil
	}
	out := make(map[string]int64, len(m.code.counters))
	for i, name := range m.manifest.Counters {
		out[name] = m.code.counters[i].Load()
	}
	return out
}
