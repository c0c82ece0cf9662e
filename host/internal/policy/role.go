package policy

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// role is the common part of admit, place and layout policies: one guest, native or an instance of a module, with
// serialised calls. An instance that failed is dropped, and the built-in policy answers until another one has started.
type role[G any] struct {
	m        *Module
	settings settings
	usage    sandbox.Usage
	restarts *restarter
	export   string
	buffers  map[int]uint32 // sizes of the buffers that an instance must provide, by kind; BufferRoots is optional

	mu     sync.Mutex
	known  []namespace // in the order of their announcement
	native bool
	guest  G
	in     *sandbox.Instance // nil for a native guest, and while the guest is down
	call   sandbox.Export
	err    error // the reason for which the role has ended; nil while it runs
}

type namespace struct {
	id   uint32
	text string
}

// begin starts the guest, so that a module that cannot start fails here.
func (r *role[G]) begin(ctx context.Context) (err error) {
	if err := r.m.prepare(&r.settings); err != nil {
		return err
	}
	r.restarts = &restarter{m: r.m, role: r.settings.role}
	r.restarts.ctx, r.restarts.cancel = context.WithCancel(context.Background())
	if r.m.code != nil {
		return r.start(ctx)
	}
	r.guest, err = native[G](r.m, &r.settings)
	r.native = err == nil
	return err
}

// start starts an instance: the first one, or one that replaces a failed one. It gets all known namespaces.
func (r *role[G]) start(ctx context.Context) error {
	in, err := r.m.instantiate(ctx, &r.settings, &r.usage)
	if err != nil {
		return err
	}
	for kind, size := range r.buffers {
		switch {
		case err != nil:
		case kind == abi.BufferRoots:
			err = in.OfferBuffer(kind, size)
		default:
			err = in.RequireBuffer(kind, size)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.known {
		if err == nil {
			err = in.Namespace(n.id, n.text)
		}
	}
	if err != nil || r.err != nil {
		in.Close()
		return err
	}
	r.in, r.call = in, in.Export(r.export)
	r.usage.Builtin.Store(false)
	return nil
}

// drop ends the guest. The built-in policy answers from then on.
func (r *role[G]) drop() {
	if r.in != nil {
		r.in.Close()
	}
	r.in, r.native = nil, false
	r.usage.Builtin.Store(true)
}

// failed drops a failed guest, and has another one started. The error is nil if the built-in policy answers in its
// place.
func (r *role[G]) failed(err error) error {
	r.drop()
	if r.restarts.failed(err, r.start) == Halt {
		r.err = err
		return err
	}
	return nil
}

// announce passes a namespace's text to the guest, unless it was announced to this policy before.
func (r *role[G]) announce(id uint32, text string) error {
	if slices.Contains(r.known, namespace{id, text}) {
		return nil
	}
	r.known = append(r.known, namespace{id, text})
	if n, ok := any(r.guest).(guest.Namespacer); ok && r.native {
		n.Namespace(id, text)
	}
	if r.in == nil {
		return nil
	}
	return r.in.Namespace(id, text)
}

// fault returns the error of an answer that breaks the contract.
func (r *role[G]) fault(reason string, cause error) error {
	if r.in != nil {
		return r.in.Fault(r.export, reason, cause)
	}
	r.usage.Faults.Add(1)
	return &Fault{Module: r.m.name, Export: r.export, Reason: reason, Cause: cause}
}

// Namespace passes a namespace's text to the policy, before any question with its id.
func (r *role[G]) Namespace(id uint32, text string) error {
	if err := checkNamespace(r.m, id, r.settings.MaxNamespaces, text); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	err := r.announce(id, text)
	if err != nil {
		_ = r.failed(err)
	}
	return err
}

// Close ends the policy. A call in progress finishes.
func (r *role[G]) Close() error {
	r.mu.Lock()
	if r.in != nil {
		r.in.Close()
	}
	r.in, r.err = nil, ErrClosed
	r.mu.Unlock()
	r.restarts.close()
	return nil
}

// Stats may be called at any time.
func (r *role[G]) Stats() Stats { return stats(&r.usage, r.m, r.settings.role) }

func checkNamespace(m *Module, id, limit uint32, text string) error {
	if id >= limit {
		return fmt.Errorf("%w: %s: id %d, ids are below %d", ErrNamespace, m.name, id, limit)
	}
	if len(text) > maxNamespaceText {
		return fmt.Errorf("%w: %s: text has %d bytes, at most %d", ErrNamespace, m.name, len(text), maxNamespaceText)
	}
	return nil
}
