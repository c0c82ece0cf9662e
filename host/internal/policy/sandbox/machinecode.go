package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// machineCode is a module's compiled form in a runtime of its own. Loading it decodes and validates the module, which
// takes milliseconds. All users of the same module and [Cache] share it.
type machineCode struct {
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	cache    wazero.CompilationCache
	shared   *sharedCode
	key      codeKey
	users    int // guarded by shared
}

// codeKey holds the inputs of a module's machine code.
type codeKey struct {
	digest  string
	pages   uint32
	profile *Profile
}

func (s *Source) key() codeKey { return codeKey{s.Digest, s.Pages, s.Profile} }

// sharedCode holds the machine code in use.
type sharedCode struct {
	mu    sync.Mutex
	inUse map[codeKey]*machineCode
}

// share returns the machine code in use, or else the result of load. The caller must give it back. Two callers may load
// the same code; the first result is shared.
func (s *sharedCode) share(key codeKey, load func() (*machineCode, error)) (*machineCode, error) {
	if m := s.take(key, nil); m != nil {
		return m, nil
	}
	loaded, err := load()
	if err != nil {
		return nil, err
	}
	m := s.take(key, loaded)
	if m != loaded {
		if err := loaded.release(context.Background()); err != nil {
			return nil, errors.Join(err, m.give(context.Background()))
		}
	}
	return m, nil
}

// take returns the machine code in use; if there was none, loaded becomes it.
func (s *sharedCode) take(key codeKey, loaded *machineCode) *machineCode {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.inUse[key]
	if m == nil && loaded != nil {
		m = loaded
		m.shared, m.key = s, key
		if s.inUse == nil {
			s.inUse = map[codeKey]*machineCode{}
		}
		s.inUse[key] = m
	}
	if m != nil {
		m.users++
	}
	return m
}

// give gives the machine code back. The last call releases it.
func (m *machineCode) give(ctx context.Context) error {
	s := m.shared
	s.mu.Lock()
	m.users--
	last := m.users == 0
	if last {
		delete(s.inUse, m.key)
	}
	s.mu.Unlock()
	if !last {
		return nil
	}
	return m.release(ctx)
}

func (m *machineCode) release(ctx context.Context) error {
	return errors.Join(m.runtime.Close(ctx), m.cache.Close(ctx))
}

// newMachineCode loads a module's machine code from a directory into a runtime of its own, because modules must not see
// each other's memory and exports. wazero keeps compiled code in memory while its cache is open, and a host may swap
// policies for a year, so each module also has a cache of its own. No code is compiled here.
func newMachineCode(ctx context.Context, src *Source, bytes []byte, dir string) (*machineCode, error) {
	m := &machineCode{}
	var err error
	if m.cache, err = wazero.NewCompilationCacheWithDir(dir); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCache, err)
	}
	m.runtime = wazero.NewRuntimeWithConfig(ctx, runtimeConfig(src.Pages).WithCompilationCache(m.cache))
	if err = m.link(ctx, src.Scan); err == nil {
		var named experimental.FunctionListener
		if src.Profile != nil {
			named = src.Profile
		}
		cached := withoutCompiling(withListeners(ctx, refueler{}, named))
		m.compiled, err = m.runtime.CompileModule(cached, bytes)
	}
	if err != nil {
		_ = m.release(ctx) // the first error is the one that matters
		return nil, err
	}
	return m, nil
}

// link provides the module's imported functions, which were checked before.
func (m *machineCode) link(ctx context.Context, scan *Scan) error {
	builders := map[string]wazero.HostModuleBuilder{}
	done := map[[2]string]bool{}
	for _, i := range scan.Imports {
		if done[[2]string{i.Module, i.Name}] {
			continue
		}
		done[[2]string{i.Module, i.Name}] = true
		if builders[i.Module] == nil {
			builders[i.Module] = m.runtime.NewHostModuleBuilder(i.Module)
		}
		f := hostFunctions[i.Module][i.Name]
		builders[i.Module].NewFunctionBuilder().
			WithGoModuleFunction(api.GoModuleFunc(f.Call), wasmTypes(f.params), wasmTypes(f.results)).Export(i.Name)
	}
	for module, b := range builders {
		if _, err := b.Instantiate(ctx); err != nil {
			return fmt.Errorf("cannot provide %s: %w", module, err)
		}
	}
	return nil
}
