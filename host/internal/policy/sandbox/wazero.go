package sandbox

import (
	"context"
	"slices"

	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// runtimeConfig returns the configuration of a runtime for a module with at most the given pages of memory. Child and
// parent must use the same one, because the machine code depends on it.
func runtimeConfig(pages uint32) wazero.RuntimeConfig {
	return wazero.NewRuntimeConfigCompiler().WithMemoryLimitPages(pages).WithDebugInfoEnabled(false)
}

// withListeners makes compiled code call l when a guest has used up its fuel, and named, if it is not nil, around each
// function with a name or an export. The machine code contains these calls, so child and parent must both use them.
func withListeners(ctx context.Context, l, named experimental.FunctionListener) context.Context {
	return experimental.WithFunctionListenerFactory(ctx, experimental.FunctionListenerFactoryFunc(
		func(f api.FunctionDefinition) experimental.FunctionListener {
			switch {
			case slices.Contains(f.ExportNames(), meter.Refuel):
				return l
			case f.Name() != "" || len(f.ExportNames()) > 0:
				return named
			}
			return nil
		}))
}

// withoutCompiling returns a context with which CompileModule takes machine code from its cache or fails: wazero's
// parallel compiler checks its context before each function, and the cache does not.
func withoutCompiling(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	cancel(errNotCached)
	return experimental.WithCompilationWorkers(ctx, 2)
}

type noListener struct{}

func (noListener) Before(context.Context, api.Module, api.FunctionDefinition, []uint64, experimental.StackIterator) {
}
func (noListener) After(context.Context, api.Module, api.FunctionDefinition, []uint64) {}
func (noListener) Abort(context.Context, api.Module, api.FunctionDefinition, error)    {}
