package sandbox

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// Profile collects the fuel of a module's functions, by export. It is for authors of policies: code that is compiled
// for it calls the host around each function with a name in the module's name section, is not cached, and is slow. Fuel
// is the same as without it, to the unit. The fuel of functions without a name counts for their callers.
type Profile struct {
	mu        sync.Mutex
	functions map[[2]string]*FunctionFuel
	stacks    map[*Instance][]profiled // functions on the stack, by instance
}

// FunctionFuel is the fuel of one function in calls of one export.
type FunctionFuel struct {
	Export, Function string
	Calls            uint64
	Fuel             uint64 // without its callees
	Whole            uint64 // with its callees

	active int // occurrences on the stack, so that a recursive function counts once in Whole
}

// profiled is a function on an instance's stack.
type profiled struct {
	*FunctionFuel
	from, called int64 // fuel used before its call, and by its callees
}

// Functions returns all functions that were called: exports in order of their fuel, and within an export functions in
// order of their own fuel.
func (p *Profile) Functions() []FunctionFuel {
	p.mu.Lock()
	defer p.mu.Unlock()
	sums, out := map[string]uint64{}, []FunctionFuel(nil)
	for f := range maps.Values(p.functions) {
		sums[f.Export] += f.Fuel
		out = append(out, *f)
	}
	slices.SortFunc(out, func(a, b FunctionFuel) int {
		return cmp.Or(cmp.Compare(sums[b.Export], sums[a.Export]), cmp.Compare(a.Export, b.Export),
			cmp.Compare(b.Fuel, a.Fuel), cmp.Compare(a.Function, b.Function))
	})
	return out
}

// spent returns the fuel that the current call has used, plus a constant.
func (in *Instance) spent() int64 { return -in.budget.left - int64(in.fuel.Get()) }

func (p *Profile) Before(ctx context.Context, _ api.Module, f api.FunctionDefinition, _ []uint64, _ experimental.StackIterator) {
	in := ctx.Value(instanceKey{}).(*Instance)
	exported, name := strings.Join(f.ExportNames(), ", "), f.Name()
	key := [2]string{exported, meter.Printable(cmp.Or(name, exported), maxTextBytes)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.functions == nil {
		p.functions, p.stacks = map[[2]string]*FunctionFuel{}, map[*Instance][]profiled{}
	}
	if stack := p.stacks[in]; len(stack) > 0 {
		key[0] = stack[0].Export
	}
	use := p.functions[key]
	if use == nil {
		use = &FunctionFuel{Export: key[0], Function: key[1]}
		p.functions[key] = use
	}
	use.Calls++
	use.active++
	p.stacks[in] = append(p.stacks[in], profiled{FunctionFuel: use, from: in.spent()})
}

func (p *Profile) After(ctx context.Context, _ api.Module, _ api.FunctionDefinition, _ []uint64) {
	in := ctx.Value(instanceKey{}).(*Instance)
	p.mu.Lock()
	defer p.mu.Unlock()
	stack := p.stacks[in]
	last := len(stack) - 1
	f := stack[last]
	p.stacks[in] = stack[:last]
	whole := in.spent() - f.from
	f.Fuel += uint64(whole - f.called)
	if f.active--; f.active == 0 {
		f.Whole += uint64(whole)
	}
	if last > 0 {
		stack[last-1].called += whole
	}
}

func (p *Profile) Abort(ctx context.Context, m api.Module, f api.FunctionDefinition, _ error) {
	p.After(ctx, m, f, nil)
}
