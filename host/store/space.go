package store

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// Space is a namespace as one store knows it: interned, with a layout plan per group.
type Space struct {
	ID     uint32
	Digest chunk.Digest
	ns     *namespace
	groups []chunk.Group
}

// Plan is the layout plan that pieces of a group are written with now; nil for a group that the namespace lacks.
func (sp *Space) Plan(group uint32) *chunk.Plan {
	if c := sp.ns.class(group); c != nil {
		return c.plan
	}
	return nil
}

// namespace is what the store needs to know of one, also of those that only a scan has met.
type namespace struct {
	ttl    time.Duration // of its entries; 0: they do not expire
	id     uint32
	digest chunk.Digest
	text   string
	keyLen uint32
	admit  *office[admission]
	layout *office[arranger]
	place  *office[naming]
	groups atomic.Pointer[map[uint32]*class] // for new pieces; complete once a session has opened the namespace
	all    []*class                          // those of earlier policies too; guarded by spaces.mu
	space  *Space                            // nil until a session has opened the namespace
}

// class is the one that new pieces of a group get, or nil.
func (ns *namespace) class(group uint32) *class { return (*ns.groups.Load())[group] }

// class is a group of a namespace under one naming and one layout plan: what an index entry names in two bytes. When either
// is swapped, new pieces get a new class, and the old one lasts for as long as it has entries.
type class struct {
	id, base   uint16 // base: of the first class of the group, by which lookups compare
	ns         *namespace
	names      *naming
	in         *spaces
	refs       atomic.Int64 // entries, puts that have none yet, and one while new pieces get it
	group      uint32
	printer    chunk.Printer
	lookup     chunk.Lookup
	ranks      uint64 // all ranks of the namespace
	plan       *chunk.Plan
	dataOffset int64
	piece      atomic.Int64 // see fileBytes
}

// isPiece says whether a header is of this piece.
func (c *class) isPiece(h *pieceformat.Header, k *chunk.Key, rank uint32) bool {
	return h.IsOf(c.ns.digest, c.group, k, rank)
}

// fileBytes is the size of one piece under plan; 0 until a session has opened the namespace. Unlike the rest it is read
// of classes that the reader has no Space of: a victim's, say.
func (c *class) fileBytes() int64 { return c.piece.Load() }

// spaces interns namespaces, classes and tenants. Classes are read without its lock.
type spaces struct {
	mu      sync.Mutex
	byID    map[chunk.Digest]*namespace
	dormant map[chunk.Digest]string // texts that roots have kept
	unread  map[chunk.Digest]error  // why a text that is there is not among them
	classes atomic.Pointer[[]*class]
	tenants atomic.Pointer[[]uint32]
	tenant  map[uint32]uint16
	free    []uint16 // numbers of classes that are over

	ended sync.Mutex // after any other lock
	over  []*class   // that nobody uses, for the janitor
	kick  chan struct{}
}

func newSpaces() *spaces {
	t := &spaces{byID: map[chunk.Digest]*namespace{}, dormant: map[chunk.Digest]string{}, unread: map[chunk.Digest]error{}, tenant: map[uint32]uint16{}, kick: make(chan struct{}, 1)}
	t.classes.Store(new([]*class))
	t.tenants.Store(new([]uint32))
	return t
}

func (t *spaces) class(id uint16) *class    { return (*t.classes.Load())[id] }
func (t *spaces) base(id uint16) uint16     { return t.class(id).base }
func (t *spaces) tenantOf(id uint16) uint32 { return (*t.tenants.Load())[id] }

// print is the fingerprint of a class's key.
func (t *spaces) print(id uint16, k chunk.Key) uint64 {
	c := t.class(id)
	return c.printer.Print(&k)
}

// internTenant gives a tenant's two-byte name.
func (t *spaces) internTenant(tenant uint32) (uint16, error) {
	if list := *t.tenants.Load(); len(list) > 0 && list[0] == tenant {
		return 0, nil // one tenant is the usual case
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, ok := t.tenant[tenant]; ok {
		return id, nil
	}
	list := *t.tenants.Load()
	if len(list) > 1<<16-1 {
		return 0, fmt.Errorf("%w: %d tenants", ErrTooMany, len(list))
	}
	id := uint16(len(list))
	list = append(slices.Clip(list), tenant)
	t.tenants.Store(&list)
	t.tenant[tenant] = id
	return id, nil
}

// classOf interns a group. The caller holds t.mu.
func (t *spaces) classOf(ns *namespace, group uint32) (*class, error) {
	if c := ns.class(group); c != nil {
		return c, nil
	}
	c, err := t.newClass(ns, group, ns.place.now.Load())
	if err != nil {
		return nil, err
	}
	t.elect(c)
	return c, nil
}

// newClass makes a class that nobody uses yet; it has one reference, the caller's. The caller holds t.mu.
func (t *spaces) newClass(ns *namespace, group uint32, names *naming) (*class, error) {
	c := &class{ns: ns, group: group, printer: chunk.PrinterOf(ns.digest, group), names: names, in: t}
	list := *t.classes.Load()
	switch n := len(t.free); {
	case n > 0:
		c.id, t.free = t.free[n-1], t.free[:n-1]
		list = slices.Clone(list) // readers have the other
		list[c.id] = c
	case len(list) > 1<<16-1:
		return nil, fmt.Errorf("%w: %d groups over all namespaces", ErrTooMany, len(list))
	default:
		c.id = uint16(len(list))
		list = append(slices.Clip(list), c)
	}
	c.base = c.id
	for _, o := range ns.all {
		if o.group == group {
			c.base, c.lookup, c.ranks = o.base, o.lookup, o.ranks
		}
	}
	c.refs.Store(1)
	names.refs.Add(1)
	ns.all = append(ns.all, c)
	t.classes.Store(&list)
	return c, nil
}

// elect makes a class the one that new pieces of its group get, in the place of an earlier one. The caller holds t.mu and
// gives its reference to the namespace.
func (t *spaces) elect(c *class) {
	groups := maps.Clone(*c.ns.groups.Load())
	old := groups[c.group]
	groups[c.group] = c
	c.ns.groups.Store(&groups)
	if old != nil {
		old.drop()
	}
}

// lay gives a class the layout of its pieces.
func (c *class) lay(plan *chunk.Plan) {
	c.plan = plan
	c.dataOffset = pieceformat.DataOffset(len(plan.Extents()))
	c.piece.Store(pieceformat.FileBytes(plan))
}

// intern makes a namespace known by its text, to the store and to the policies.
func (s *Store) intern(digest chunk.Digest, text string) (*namespace, error) {
	t := s.spaces
	t.mu.Lock()
	defer t.mu.Unlock()
	if ns := t.byID[digest]; ns != nil {
		return ns, nil
	}
	return s.number(digest, text)
}

// number interns a namespace that has no number. The caller holds spaces.mu.
func (s *Store) number(digest chunk.Digest, text string) (*namespace, error) {
	t := s.spaces
	if len(t.byID) >= maxNamespaces {
		return nil, fmt.Errorf("%w: %d namespaces; when the host is started again, those with entries have a place, and the others none", ErrTooMany, len(t.byID))
	}
	ns := &namespace{
		id: uint32(len(t.byID)), digest: digest, text: text, keyLen: keyLenOf(text),
		ttl:   s.cfg.ttlOf(text),
		admit: s.admit.of(text), layout: s.layout.of(text), place: s.place.of(text),
	}
	ns.groups.Store(&map[uint32]*class{})
	if err := s.announce(ns); err != nil {
		return nil, err
	}
	t.byID[digest] = ns
	delete(t.dormant, digest)
	return ns, nil
}

// keyLenOf reads the length of a namespace's keys from its text.
func keyLenOf(text string) uint32 {
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, "key_bytes="); ok {
			n, err := strconv.Atoi(strings.TrimSpace(v))
			if err == nil && n > 0 && n <= chunk.KeyBytes {
				return uint32(n)
			}
		}
	}
	return chunk.KeyBytes
}

// Space interns a namespace: the same one gives the same Space. Its text and its plans are durable in every root before
// it returns, because a restart can make nothing of a piece without them.
func (s *Store) Space(ctx context.Context, n *chunk.Namespace) (*Space, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	digest, text := n.Digest(), n.Text()
	if err := s.opening.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer s.opening.Release(1)
	if s.closed.Load() {
		return nil, ErrClosed
	}
	ns, err := s.intern(digest, text)
	if err != nil {
		return nil, err
	}
	if ns.space != nil {
		return ns.space, nil
	}
	plans, err := s.plansOf(ctx, ns, n.Groups, ns.layout.now.Load())
	if err != nil {
		return nil, fmt.Errorf("store: %s: %w", n.Model, err)
	}
	for _, r := range s.roots {
		if err := r.keepForStores(pieceformat.NamespacesDir, digest, []byte(text)); err != nil {
			return nil, err
		}
	}
	return s.open(ns, n, plans)
}

// plansOf asks for the layout of a namespace's groups and keeps the plans in every root: whoever reads a piece later needs
// the one that it was written under.
func (s *Store) plansOf(ctx context.Context, ns *namespace, groups []chunk.Group, a *arranger) ([]*chunk.Plan, error) {
	plans := make([]*chunk.Plan, len(groups))
	for i, g := range groups {
		var err error
		if plans[i], err = a.policy.Plan(ns.id, g.ID, ns.text, g.Geometry); err != nil {
			return nil, fmt.Errorf("group %d: %w", g.ID, err)
		}
	}
	for _, r := range s.roots {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for _, p := range plans {
			if err := r.keepForStores(pieceformat.PlansDir, p.Digest(), p.Encoded()); err != nil {
				return nil, err
			}
		}
	}
	return plans, nil
}

// opened is what sessions have opened: what a root must hold so that a restart understands its pieces.
type openedSpace struct {
	ns    *namespace
	plans []*chunk.Plan
}

func (t *spaces) opened() (list []openedSpace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ns := range t.byID {
		o := openedSpace{ns: ns}
		for _, c := range ns.all {
			if c.plan != nil {
				o.plans = append(o.plans, c.plan)
			}
		}
		list = append(list, o)
	}
	return list
}

// open completes a namespace's classes, those of earlier namings too: what is missing of their entries is written under
// today's plan. The caller holds Store.opening; readers have no Space for it yet.
func (s *Store) open(ns *namespace, n *chunk.Namespace, plans []*chunk.Plan) (*Space, error) {
	s.spaces.mu.Lock()
	defer s.spaces.mu.Unlock()
	for i, g := range n.Groups {
		if _, err := s.spaces.classOf(ns, g.ID); err != nil {
			return nil, err
		}
		for _, c := range ns.all {
			if c.group == g.ID {
				c.lookup, c.ranks = g.Lookup, 1<<n.Ranks()-1
				c.lay(plans[i])
			}
		}
	}
	ns.space = &Space{ID: ns.id, Digest: ns.digest, ns: ns, groups: n.Groups}
	return ns.space, nil
}
