package catalog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Namespace is a namespace with a number, and the policies that are bound to it. Policies learn of a namespace once, by its
// number, and may use the number for as long as they run. A number is therefore never reused within a run.
type Namespace struct {
	ID     uint32
	Digest kv.Digest
	Text   string
	KeyLen uint32
	TTL    time.Duration // time to live of its entries; 0 means that they do not expire
	Admit  bound[*policy.Admit]
	Layout bound[*policy.Layout]
	Place  bound[*policy.Place]

	Compression *codec.Namespace
	element     atomic.Int64

	current atomic.Pointer[map[uint32]*Class] // classes for new pieces by group; complete after a session has opened the namespace
	classes []*Class                          // all classes, including those of earlier policies; guarded by Catalog.mu
	groups  []kv.Group                        // nil until a session has opened the namespace; guarded by Catalog.opening
}

// Element returns the size of the numbers in the pages, in bytes. It is 0 until a session has opened the namespace.
func (ns *Namespace) Element() int { return int(ns.element.Load()) }

// Class returns the class that new pieces of a group get, or nil.
func (ns *Namespace) Class(group uint32) *Class { return (*ns.current.Load())[group] }

// OpenClass is Class for a group that a session has opened.
func (ns *Namespace) OpenClass(group uint32) (*Class, error) {
	if ns == nil {
		return nil, fmt.Errorf("%w: no namespace", ErrUnknownNamespace)
	}
	cl := ns.Class(group)
	if cl == nil || cl.Plan == nil {
		return nil, fmt.Errorf("%w: group %d", ErrUnknownNamespace, group)
	}
	return cl, nil
}

// AcquireClass is OpenClass with a reference, which the caller must release.
func (ns *Namespace) AcquireClass(group uint32) (*Class, error) {
	for {
		cl, err := ns.OpenClass(group)
		if err != nil || cl.acquire() {
			return cl, err
		}
	}
}

// Plan returns the layout plan for new pieces of a group, or nil if the namespace does not have the group.
func (ns *Namespace) Plan(group uint32) *kv.Plan {
	if cl := ns.Class(group); cl != nil {
		return cl.Plan
	}
	return nil
}

// Admits asks the namespace's admit policy. If the policy is replaced during the call, it asks the successor.
func (ns *Namespace) Admits(ask []abi.Candidate, answer []bool) error {
	for {
		a := ns.Admit.Now()
		if err := a.Policy.Admit(ask, answer); !errors.Is(err, policy.ErrClosed) || ns.Admit.Now() == a {
			return err
		}
	}
}

func (ns *Namespace) files(visit func(dir, base string, data []byte) error, plans []*kv.Plan) error {
	if err := visit(pieceformat.NamespacesDir, ns.Digest.String(), []byte(ns.Text)); err != nil {
		return err
	}
	for _, p := range plans {
		if err := visit(pieceformat.PlansDir, p.Digest().String(), p.Encoded()); err != nil {
			return err
		}
	}
	return nil
}

// Namespaces returns all namespaces with a number, in the order of their numbers.
func (c *Catalog) Namespaces() []*Namespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Values(c.byDigest), func(a, b *Namespace) int { return cmp.Compare(a.ID, b.ID) })
}

// Known returns the namespace with a digest if it has a number, and nil otherwise.
func (c *Catalog) Known(d kv.Digest) *Namespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byDigest[d]
}

// plans returns the plans of a namespace's classes. Catalog.mu must be held.
func (ns *Namespace) plans() (plans []*kv.Plan) {
	for _, cl := range ns.classes {
		if cl.Plan != nil {
			plans = append(plans, cl.Plan)
		}
	}
	return plans
}

// Open returns a namespace with a class for each of its groups. It returns the same pointer for the same namespace. Before it
// returns, the text and the plans are durable in every root, because without them a restarted host cannot read the pieces.
func (c *Catalog) Open(ctx context.Context, n *kv.Namespace) (*Namespace, error) {
	if err := c.Lock(ctx); err != nil {
		return nil, err
	}
	defer c.Unlock()
	ns, err := c.register(n.Digest(), n.Text())
	if err != nil {
		return nil, err
	}
	if ns.groups != nil {
		ns.element.Store(int64(n.Element())) // the namespace may have been opened by its text, which does not contain the element size
		return ns, nil
	}
	plans, err := ns.makePlans(ctx, c.opt.Roots, n.Groups, ns.Layout.Now().Policy)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", n.Model, err)
	}
	if err := c.opt.Roots.Keep(pieceformat.NamespacesDir, ns.Digest.String(), []byte(ns.Text)); err != nil {
		return nil, err
	}
	if err := c.complete(ns, n, plans); err != nil {
		return nil, err
	}
	return ns, nil
}

// Reopen opens a namespace of which only the text is known, as a session would do. Without a plan, existing pieces cannot be
// copied. It does nothing if the class has a plan.
func (c *Catalog) Reopen(ctx context.Context, cl *Class) error {
	if cl.FileBytes() > 0 {
		return nil
	}
	n, err := kv.ParseNamespace(cl.Namespace.Text)
	if err != nil {
		return err
	}
	_, err = c.Open(ctx, n)
	return err
}

// makePlans asks the layout policy for the plans of groups and stores them in all roots. A piece can be read only with the plan
// under which it was written.
func (ns *Namespace) makePlans(
	ctx context.Context, roots Roots, groups []kv.Group, layout *policy.Layout,
) ([]*kv.Plan, error) {
	plans := make([]*kv.Plan, len(groups))
	for i, g := range groups {
		var err error
		if plans[i], err = layout.Plan(ns.ID, g.ID, ns.Text, g.Geometry); err != nil {
			return nil, fmt.Errorf("group %d: %w", g.ID, err)
		}
	}
	for _, p := range plans {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := roots.Keep(pieceformat.PlansDir, p.Digest().String(), p.Encoded()); err != nil {
			return nil, err
		}
	}
	return plans, nil
}

// complete sets the plans of a namespace's classes. Missing pieces of entries that a scan has found will be written under the
// current plan. Lock must be held, and no session may have opened the namespace yet.
func (c *Catalog) complete(ns *Namespace, n *kv.Namespace, plans []*kv.Plan) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, g := range n.Groups {
		if _, err := c.classOf(ns, g.ID); err != nil {
			return err
		}
		for _, cl := range ns.classes {
			if cl.Group == g.ID {
				cl.Lookup, cl.Ranks = g.Lookup, 1<<n.Ranks()-1
				cl.setPlan(plans[i])
			}
		}
	}
	ns.groups = n.Groups
	ns.element.Store(int64(n.Element()))
	return nil
}

func (c *Catalog) register(digest kv.Digest, text string) (*Namespace, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ns := c.byDigest[digest]; ns != nil {
		return ns, nil
	}
	return c.assignNumber(digest, text)
}

// assignNumber creates a namespace with a number and announces it to its policies. c.mu must be held.
func (c *Catalog) assignNumber(digest kv.Digest, text string) (*Namespace, error) {
	if len(c.byDigest) >= MaxNamespaces {
		return nil, fmt.Errorf("%w: %d namespaces; a restart makes room for those that have entries", ErrTooMany,
			len(c.byDigest))
	}
	ns := &Namespace{
		ID: uint32(len(c.byDigest)), Digest: digest, Text: text, KeyLen: pieceformat.KeyLen(text), TTL: c.opt.Expiry(text),
		Compression: c.Compression.Namespace(text),
	}
	ns.bind(c)
	ns.current.Store(&map[uint32]*Class{})
	if err := c.announce(ns); err != nil {
		return nil, err
	}
	c.byDigest[digest] = ns
	delete(c.unregistered, digest)
	return ns, nil
}

// bind binds a namespace to policies according to the rules. Catalog.mu must be held.
func (ns *Namespace) bind(c *Catalog) {
	ns.Admit.binding.Store(c.admit.Load().of(ns.Text))
	ns.Layout.binding.Store(c.layout.Load().of(ns.Text))
	ns.Place.binding.Store(c.place.Load().of(ns.Text))
}

// At a start, a namespace gets a number only if some root holds a piece of it or a session opens it. The other namespaces in
// roots are unregistered until then. After all pieces have been found, the texts of the remaining ones are removed from the
// roots. If a session opens such a namespace later, its text is written again.

// Knows reports whether a namespace has a number or a known text.
func (c *Catalog) Knows(d kv.Digest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byDigest[d] != nil || c.unregistered[d] != ""
}

// AddText adds a text that a root holds, or the error of reading it. Pieces of a namespace with an unreadable text are left
// alone. Only pieces of a namespace without any text belong to no namespace.
func (c *Catalog) AddText(d kv.Digest, text string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		delete(c.unregistered, d)
		c.unreadable[d] = err
		return
	}
	c.unregistered[d] = text
}

// resolve returns a namespace that some root holds, and gives it a number if it has none. c.mu must be held.
func (c *Catalog) resolve(d kv.Digest) (*Namespace, error) {
	if ns := c.byDigest[d]; ns != nil {
		return ns, nil
	}
	text := c.unregistered[d]
	if err := c.unreadable[d]; err != nil && text == "" {
		return nil, err
	}
	if text == "" {
		return nil, fmt.Errorf("%w: digest %s", ErrUnknownNamespace, d)
	}
	ns, err := c.assignNumber(d, text)
	if err != nil {
		delete(c.unregistered, d) // do not try again for each of its pieces; the roots keep the text
		c.unreadable[d] = err
		c.log.Warn("namespace left out", "namespace", d, "error", err)
	}
	return ns, err
}

// ForgetUnregistered removes the texts of namespaces that have no piece in any root. All pieces must have been found, and Lock
// must be held.
func (c *Catalog) ForgetUnregistered() {
	c.mu.Lock()
	texts := c.unregistered
	c.unregistered = map[kv.Digest]string{}
	c.mu.Unlock()
	for d := range texts {
		c.opt.Roots.Forget(pieceformat.NamespacesDir, d.String())
	}
}
