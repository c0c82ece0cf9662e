package policy

import (
	"context"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// Handle is a counted reference to a [Module], with a label and settings. The module is closed when the last reference
// is released.
//
// Ownership: the function that creates a handle ([NewHandle], [BuiltinHandle], [Handle.As]) gives its caller one
// reference. A function that is passed a handle borrows it for the duration of the call: to keep it longer it takes a
// reference with [Handle.Acquire]. If a function or a field takes over the caller's reference instead, its comment says
// so. Every reference is released exactly once, after everything made from the module (an [Evict], [Admit], [Place] or
// [Layout]) was closed.
//
// A handle is safe for concurrent use.
type Handle struct {
	Module *Module
	Label  string // the operator's name for the policy; default: the module's name
	Config Config
	Levels uint8 // one bit for each level of a store that an admit policy admits moves to
	// Observe gets the calls of an admit or place policy. It may be nil.
	Observe Observer
	refs    *moduleRefs
}

// moduleRefs counts the references to one module, over all its handles.
type moduleRefs struct {
	n      atomic.Int32
	closed func(*Module, error)
}

// NewHandle returns a handle for a module, which it takes over. An empty label is the module's name. closed is called
// when the last reference was released and the module was closed; it may be nil.
func NewHandle(m *Module, label string, c Config, closed func(*Module, error)) *Handle {
	refs := &moduleRefs{closed: closed}
	refs.n.Store(1)
	return newHandle(m, label, c, refs)
}

func newHandle(m *Module, label string, c Config, refs *moduleRefs) *Handle {
	if label == "" {
		label = m.Name()
	}
	return &Handle{Module: m, Label: label, Config: c, refs: refs}
}

// BuiltinHandle returns a handle for the built-in policy of a role.
func BuiltinHandle(role abi.Role) *Handle { return NewHandle(Builtin(role), "", nil, nil) }

// As returns another handle for the same module, under its own label and settings, with a reference of its own.
func (h *Handle) As(label string, c Config) *Handle {
	return newHandle(h.Acquire().Module, label, c, h.refs)
}

// Acquire takes a reference and returns h. The caller must hold a reference, or have borrowed one.
func (h *Handle) Acquire() *Handle {
	for {
		n := h.refs.n.Load()
		if n <= 0 {
			panic("policy: a closed handle was acquired")
		}
		if h.refs.n.CompareAndSwap(n, n+1) {
			return h
		}
	}
}

// Release gives a reference back. The last one closes the module.
func (h *Handle) Release() {
	n := h.refs.n.Add(-1)
	if n < 0 {
		panic("policy: a handle was released twice")
	}
	if n > 0 {
		return
	}
	err := h.Module.Close(context.Background())
	if h.refs.closed != nil {
		h.refs.closed(h.Module, err)
	}
}
