package policy

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// PlaceOptions bind a place policy.
type PlaceOptions struct {
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
	// Quarantined is called when the policy must not name new files any more. It must not call the policy.
	Quarantined func()
}

// quarantinePause is the time between two starts of a module in quarantine.
const quarantinePause = 10 * time.Second

// maxRoots bounds the facts a policy is given.
const maxRoots = 64

// Place names files. It is safe for concurrent use: a pool of guests answers, each with its own memory. A path is a
// pure function of what it names, so any of them can answer. Now and then two are asked, and a policy that gives one
// piece two names is asked no more.
//
// A guest that fails is dropped, and the next call starts another. In quarantine, the remaining guests answer; without
// any, calls fail. The built-in policy does not answer in their place, because it would give other names to existing
// files. The store asks it for new files, and records that it did. For the same reason a place policy in quarantine is
// still started now and then: it names no new file, but until the store has renamed the existing ones, their names must
// be found.
type Place struct {
	m        *Module
	settings settings
	usage    sandbox.Usage

	mu       sync.Mutex
	cond     sync.Cond
	idle     []placer
	live     int
	most     int
	known    []namespace // in the order they were announced
	roots    []abi.RootFacts
	round    uint64    // counts SetRoots
	fallback placer    // the built-in policy, for what the guest leaves to the host
	down     error     // the last fault
	again    time.Time // no guest is started before; never again when zero
	err      error

	until       atomic.Int64 // by nanotime: nobody answers before
	quarantined atomic.Bool
	told        func()        // of the quarantine
	impure      atomic.Bool   // its answers are worth nothing
	asked       atomic.Uint64 // paths asked for
	given       given
	refuses     atomic.Bool // some namespace
}

type namespace struct {
	id      uint32
	text    string
	refused *atomic.Pointer[error] // why a guest could not be told; it is not told another one
}

// placer is one guest of the pool, native or wasm. path and paths append. ok is false when the guest leaves the answer,
// or all answers, to the host.
type placer interface {
	// update tells of namespaces and roots. With an error, told is how many namespaces the guest knows.
	update(known []namespace, roots []abi.RootFacts, round uint64) (told int, err error)
	path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, ok bool, err error)
	// at most batch of them; with an error, those before it
	paths(queries []abi.PlaceQuery, out *PathList) (ok bool, err error)
	batch() int
	identity(path []byte) (id abi.PathIdentity, ok bool, err error)
	fault(export, reason string) error
	dead() error // why it must not be used again, nil while it may
	close()
}

// NewPlace starts the role with one guest, so that a module that cannot start fails here.
func (m *Module) NewPlace(ctx context.Context, o PlaceOptions) (*Place, error) {
	s := settings{role: abi.RolePlace, config: o.Config}
	s.Seed, s.MaxNamespaces = o.Seed, o.MaxNamespaces
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	p := &Place{m: m, settings: s, most: max(2, runtime.GOMAXPROCS(0)), usage: sandbox.Usage{Sampled: true}, told: o.Quarantined}
	p.cond.L = &p.mu
	first, err := p.start(ctx)
	if err != nil {
		return nil, err
	}
	p.idle, p.live = append(make([]placer, 0, p.most), first), 1
	return p, nil
}

func (p *Place) start(ctx context.Context) (placer, error) {
	if p.m.code == nil {
		return newNativePlacer(p.m, &p.settings, &p.usage)
	}
	return newGuestPlacer(ctx, p.m, &p.settings, &p.usage)
}

// Namespace tells the policy a namespace's text, before any query that names its id.
func (p *Place) Namespace(id uint32, text string) error {
	if err := checkNamespace(p.m, id, p.settings.MaxNamespaces, text); err != nil {
		return err
	}
	p.mu.Lock()
	if slices.ContainsFunc(p.known, func(n namespace) bool { return n.id == id && n.text == text }) {
		defer p.mu.Unlock()
		return p.err
	}
	if slices.ContainsFunc(p.known, func(n namespace) bool { return n.id == id }) {
		p.given.forget()
	}
	p.known = append(p.known, namespace{id, text, &atomic.Pointer[error]{}})
	p.mu.Unlock()
	g, err := p.acquire() // tells one guest now, so that a refusal is reported here
	if err != nil {
		return err
	}
	p.release(g)
	return nil
}

// SetRoots gives the policy current facts about the roots, at most 64. A path's root is an index into them.
func (p *Place) SetRoots(roots []abi.RootFacts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roots = slices.Clone(roots[:min(len(roots), maxRoots)])
	p.round++
}

// Path appends one piece's relative path to dst. The root is an index into the facts given to SetRoots, or [abi.None]
// when the policy leaves the choice to the host.
func (p *Place) Path(q *abi.PlaceQuery, dst []byte) (path []byte, root uint32, err error) {
	g, err := p.acquire()
	if err != nil {
		return dst, abi.None, err
	}
	out, root, err := p.pathOf(g, q, dst)
	if err == nil {
		if by := p.due(1, q, out[len(dst):]); by != nobody {
			if err = p.doubt(by, g, q, out[len(dst):]); err != nil {
				out = dst
			}
		}
	}
	p.release(g)
	return out, root, err
}

func (p *Place) pathOf(g placer, q *abi.PlaceQuery, dst []byte) ([]byte, uint32, error) {
	if err := p.refusal(q.Namespace); err != nil {
		return dst, abi.None, err
	}
	out, root, ok, err := g.path(q, dst)
	if err != nil {
		return dst, abi.None, err
	}
	if !ok {
		return p.builtinPath(q, dst)
	}
	if what := pathError(out[len(dst):]); what != "" {
		return dst, abi.None, g.fault(abi.ExportPlace, what)
	}
	return out, root, nil
}

// Paths names several pieces, in as few calls as the guest's buffers allow. With an error, out has the paths before it.
func (p *Place) Paths(queries []abi.PlaceQuery, out *PathList) error {
	out.reset()
	g, err := p.acquire()
	if err != nil {
		return err
	}
	for len(queries) > 0 && err == nil {
		n := min(len(queries), g.batch())
		if err = p.pathsOf(g, queries[:n], out); err == nil {
			if by := p.due(n, &queries[n-1], out.Path(out.Len()-1)); by != nobody {
				if err = p.doubt(by, g, &queries[n-1], out.Path(out.Len()-1)); err != nil {
					out.reset() // none of these names is worth anything
				}
			}
		}
		queries = queries[n:]
	}
	p.release(g)
	return err
}

func (p *Place) pathsOf(g placer, queries []abi.PlaceQuery, out *PathList) error {
	first := out.Len()
	if p.refuses.Load() {
		return p.eachPath(g, queries, out)
	}
	ok, err := g.paths(queries, out)
	for i := first; i < out.Len(); i++ {
		if what := pathError(out.Path(i)); what != "" {
			out.truncate(i)
			return g.fault(abi.ExportPlace, what)
		}
	}
	if err != nil || ok {
		return err
	}
	// The guest left the call to the host. Ask query by query, because a path must not depend on the queries beside it.
	return p.eachPath(g, queries, out)
}

// refusal is why the guests are not asked about a namespace.
func (p *Place) refusal(id uint32) error {
	if !p.refuses.Load() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known {
		if err := p.known[i].refused.Load(); err != nil && p.known[i].id == id {
			return *err
		}
	}
	return nil
}

// eachPath names pieces one by one.
func (p *Place) eachPath(g placer, queries []abi.PlaceQuery, out *PathList) error {
	for i := range queries {
		text, root, err := p.pathOf(g, &queries[i], out.text)
		if err != nil {
			return err
		}
		out.text = text
		out.ended(root)
	}
	return nil
}

// Identity returns what a path names. Known is 0 when Path would not return this path for it.
func (p *Place) Identity(path []byte) (abi.PathIdentity, error) {
	if pathError(path) != "" {
		return abi.PathIdentity{}, nil
	}
	g, err := p.acquire()
	if err != nil {
		return abi.PathIdentity{}, err
	}
	defer p.release(g)
	id, ok, err := g.identity(path)
	if err == nil && !ok {
		id, err = p.builtinIdentity(path)
	}
	if err != nil || id.Known == 0 {
		return abi.PathIdentity{}, err
	}
	if id.Known > 1 || id.KeyLen == 0 || id.KeyLen > abi.KeyBytes || id.Namespace >= p.settings.MaxNamespaces {
		return abi.PathIdentity{}, g.fault(abi.ExportUnplace, fmt.Sprintf("read %q as namespace %d, key of %d bytes, known %d", path, id.Namespace, id.KeyLen, id.Known))
	}
	q := abi.PlaceQuery{Namespace: id.Namespace, Group: id.Group, Rank: id.Rank, KeyLen: id.KeyLen, Key: id.Key}
	again, _, err := p.pathOf(g, &q, make([]byte, 0, len(path)))
	if err != nil || !bytes.Equal(again, path) {
		return abi.PathIdentity{}, err
	}
	return id, nil
}

// builtin is the policy that answers when the guest returns "default".
func (p *Place) builtin() (placer, error) {
	if p.fallback == nil {
		s := p.settings
		s.config = nil
		g, err := newNativePlacer(Builtin(abi.RolePlace), &s, &sandbox.Usage{})
		if err != nil {
			return nil, err
		}
		p.fallback = g
	}
	_, err := p.fallback.update(p.known, p.roots, p.round)
	return p.fallback, err
}

func (p *Place) builtinPath(q *abi.PlaceQuery, dst []byte) ([]byte, uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, err := p.builtin()
	if err != nil {
		return dst, abi.None, err
	}
	out, root, _, err := g.path(q, dst)
	if err == nil && len(out) == len(dst) {
		err = fmt.Errorf("%w: %d", ErrNamespace, q.Namespace)
	}
	return out, root, err
}

func (p *Place) builtinIdentity(path []byte) (abi.PathIdentity, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, err := p.builtin()
	if err != nil {
		return abi.PathIdentity{}, err
	}
	id, _, err := g.identity(path)
	return id, err
}

// Close ends the policy. Calls in progress finish and then close their guest.
func (p *Place) Close() error {
	p.mu.Lock()
	idle := p.idle
	p.live -= len(idle)
	p.idle, p.err = nil, ErrClosed
	p.mu.Unlock()
	p.cond.Broadcast()
	for _, g := range idle {
		g.close()
	}
	return nil
}

// Stats may be called at any time.
func (p *Place) Stats() Stats { return stats(&p.usage, p.m, abi.RolePlace) }
