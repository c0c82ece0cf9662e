package policy

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// PlaceOptions bind a place policy.
type PlaceOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
}

// maxRoots bounds the facts a policy is given.
const maxRoots = 64

// Place names new pieces. Each is asked for once, and the answer need not follow from the question: names are written
// down. It is safe for concurrent use; calls are serialised. While a module is down after a fault, and once it is in
// quarantine, new pieces get the built-in names.
type Place struct {
	m        *Module
	settings settings
	usage    sandbox.Usage
	restarts *restarter

	mu    sync.Mutex
	known []namespace // in the order they were announced
	roots []abi.RootFacts
	guest placer // nil while it is down
	err   error
}

type namespace struct {
	id   uint32
	text string
}

// placer is a guest, native or wasm.
type placer interface {
	namespace(id uint32, text string) error
	setRoots(roots []abi.RootFacts)
	// path appends a path. ok is false when the guest leaves the answer to the host.
	path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, ok bool, err error)
	// fault is the error of an answer that breaks the contract. dead is why the guest must not be used again, if so.
	fault(reason string) error
	dead() error
	close()
}

// NewPlace starts the role, so that a module that cannot start fails here.
func (m *Module) NewPlace(ctx context.Context, o PlaceOptions) (*Place, error) {
	s := settings{role: abi.RolePlace, config: o.Config}
	s.Seed, s.MaxNamespaces = o.Seed, o.MaxNamespaces
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	p := &Place{m: m, settings: s, restarts: newRestarter(m, abi.RolePlace)}
	var err error
	if p.guest, err = p.start(ctx); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Place) start(ctx context.Context) (placer, error) {
	if p.m.code == nil {
		return newNativePlacer(p.m, &p.settings, &p.usage)
	}
	return newGuestPlacer(ctx, p.m, &p.settings, &p.usage)
}

// restart replaces a failed guest by a new one, which is told all that the other was.
func (p *Place) restart(ctx context.Context) error {
	g, err := p.start(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.known {
		if err == nil {
			err = g.namespace(n.id, n.text)
		}
	}
	if err != nil || p.err != nil {
		g.close()
		return err
	}
	g.setRoots(p.roots)
	p.guest = g
	p.usage.Builtin.Store(false)
	return nil
}

// judge drops the guest if an error was the end of it.
func (p *Place) judge(err error) {
	if p.guest.dead() == nil {
		return
	}
	p.drop()
	if p.restarts.failed(err, p.restart) == Halt {
		p.err = err
	}
}

func (p *Place) drop() {
	p.guest.close()
	p.guest = nil
	p.usage.Builtin.Store(true)
}

// Namespace tells the policy a namespace's text, before any query that names its id.
func (p *Place) Namespace(id uint32, text string) error {
	if err := checkNamespace(p.m, id, p.settings.MaxNamespaces, text); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err
	}
	if slices.Contains(p.known, namespace{id, text}) {
		return nil // it was bound to this policy before
	}
	p.known = append(p.known, namespace{id, text})
	if p.guest == nil {
		return nil
	}
	err := p.guest.namespace(id, text)
	if err != nil {
		p.judge(err)
	}
	return err
}

// SetRoots gives the policy current facts about the roots, at most 64. A path's root is an index into them.
func (p *Place) SetRoots(roots []abi.RootFacts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roots = slices.Clone(roots[:min(len(roots), maxRoots)])
	if p.guest != nil {
		p.guest.setRoots(p.roots)
	}
}

// Path appends a new piece's path below its root to dst: nothing where it gets the built-in name, which it does with every
// error, too. The root is an index into the facts given to SetRoots, or [abi.None] when the policy leaves the choice to
// the host.
func (p *Place) Path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil || p.guest == nil {
		return dst, abi.None, p.err
	}
	out, root, ok, err := p.guest.path(q, dst)
	if err == nil && !ok {
		return dst, abi.None, nil
	}
	if err == nil {
		reason := pathError(out[len(dst):])
		if root != abi.None && uint64(root) >= uint64(len(p.roots)) {
			reason = fmt.Sprintf("chose root %d of %d", root, len(p.roots))
		}
		if reason == "" {
			return out, root, nil
		}
		err = p.guest.fault(reason)
	}
	p.judge(err)
	return dst, abi.None, err
}

// Misnamed records a name that a piece cannot have: another file has it, or stands on the way to it. It counts as a fault.
func (p *Place) Misnamed(cause error) {
	p.usage.Faults.Add(1)
	if p.m.code == nil {
		return
	}
	verdict, _ := p.m.Failed(abi.RolePlace, cause)
	p.mu.Lock()
	defer p.mu.Unlock()
	if verdict == Halt && p.err == nil {
		p.err = cause
	}
	if verdict != Restart && p.guest != nil {
		p.drop()
	}
}

// Close ends the policy. A call in progress finishes.
func (p *Place) Close() error {
	p.mu.Lock()
	if p.guest != nil {
		p.guest.close()
		p.guest = nil
	}
	p.err = ErrClosed
	p.mu.Unlock()
	p.restarts.close()
	return nil
}

// Stats may be called at any time.
func (p *Place) Stats() Stats { return stats(&p.usage, p.m, abi.RolePlace) }
