package policy

import (
	"cmp"
	"context"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// Handle is a counted reference to a [Module], with a label and settings. The module is closed when the last reference
// is released.
//
// Ownership: the function that creates a handle ([NewHandle], [BuiltinHandle]) gives its caller one
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

	refs   atomic.Int32
	closed func(*Module, error)
}

// NewHandle returns a handle for a module, which it takes over. An empty label is the module's name. closed is called
// when the last reference was released and the module was closed; it may be nil.
func NewHandle(m *Module, label string, c Config, closed func(*Module, error)) *Handle {
	h := &Handle{Module: m, Label: cmp.Or(label, m.Name()), Config: c, closed: closed}
	h.refs.Store(1)
	return h
}

// BuiltinHandle returns a handle for the built-in policy of a role.
func BuiltinHandle(role abi.Role) *Handle { return NewHandle(Builtin(role), "", nil, nil) }

// Acquire takes a reference and returns h. The caller must hold a reference, or have borrowed one.
func (h *Handle) Acquire() *Handle {
	for {
		n := h.refs.Load()
		if n <= 0 {
			panic("policy: a closed handle was acquired")
		}
		if h.refs.CompareAndSwap(n, n+1) {
			return h
		}
	}
}

// Release gives a reference back. The last one closes the module.
func (h *Handle) Release() {
	n := h.refs.Add(-1)
	if n < 0 {
		panic("policy: a handle was released twice")
	}
	if n > 0 {
		return
	}
	err := h.Module.Close(context.Background())
	if h.closed != nil {
		h.closed(h.Module, err)
	}
}
