package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/chunk"
)

// Space is a namespace as one store knows it: interned, with a layout plan per group.
type Space struct {
	ID     uint32
	Digest chunk.Digest
	ns     *namespace
}

// Plan is the layout plan that pieces of a group are written with now; nil for a group that the namespace lacks.
func (sp *Space) Plan(group uint32) *chunk.Plan {
	if c := sp.ns.classes[group]; c != nil {
		return c.plan
	}
	return nil
}

// namespace is what the store needs to know of one, also of those that only a scan has met.
type namespace struct {
	id      uint32
	digest  chunk.Digest
	text    string
	keyLen  uint32
	classes map[uint32]*class // by group; complete once a session has opened the namespace
	space   *Space            // nil until then
}

// class is a group of a namespace: what an index entry names in two bytes.
type class struct {
	id         uint16
	ns         *namespace
	group      uint32
	lookup     chunk.Lookup
	ranks      uint64 // all ranks of the namespace
	plan       *chunk.Plan
	dataOffset int64
	piece      atomic.Int64 // see fileBytes
}

// fileBytes is the size of one piece under plan; 0 until a session has opened the namespace. Unlike the rest it is read
// of classes that the reader has no Space of: a victim's, say.
func (c *class) fileBytes() int64 { return c.piece.Load() }

// spaces interns namespaces, classes and tenants. Classes are read without its lock.
type spaces struct {
	mu      sync.Mutex
	byID    map[chunk.Digest]*namespace
	classes atomic.Pointer[[]*class]
	tenants atomic.Pointer[[]uint32]
	tenant  map[uint32]uint16
}

func newSpaces() *spaces {
	t := &spaces{byID: map[chunk.Digest]*namespace{}, tenant: map[uint32]uint16{}}
	t.classes.Store(new([]*class))
	t.tenants.Store(new([]uint32))
	return t
}

func (t *spaces) class(id uint16) *class    { return (*t.classes.Load())[id] }
func (t *spaces) tenantOf(id uint16) uint32 { return (*t.tenants.Load())[id] }

// print is the fingerprint of a class's key.
func (t *spaces) print(id uint16, k chunk.Key) uint64 {
	c := t.class(id)
	return chunk.Fingerprint(c.ns.digest, c.group, k)
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
	if c := ns.classes[group]; c != nil {
		return c, nil
	}
	list := *t.classes.Load()
	if len(list) > 1<<16-1 {
		return nil, fmt.Errorf("%w: %d groups over all namespaces", ErrTooMany, len(list))
	}
	c := &class{id: uint16(len(list)), ns: ns, group: group}
	ns.classes[group] = c
	list = append(slices.Clip(list), c)
	t.classes.Store(&list)
	return c, nil
}

// intern makes a namespace known by its text, to the store and to the policies.
func (s *Store) intern(digest chunk.Digest, text string) (*namespace, error) {
	t := s.spaces
	t.mu.Lock()
	defer t.mu.Unlock()
	if ns := t.byID[digest]; ns != nil {
		return ns, nil
	}
	if len(t.byID) >= maxNamespaces {
		return nil, fmt.Errorf("%w: %d namespaces", ErrTooMany, len(t.byID))
	}
	ns := &namespace{
		id: uint32(len(t.byID)), digest: digest, text: text, keyLen: keyLenOf(text), classes: map[uint32]*class{},
	}
	if err := s.names.namespace(ns); err != nil {
		return nil, err
	}
	if err := s.admit.Namespace(ns.id, text); err != nil {
		s.admissionFault(err)
	}
	t.byID[digest] = ns
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
	s.opening.Lock()
	defer s.opening.Unlock()
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
	plans := make([]*chunk.Plan, len(n.Groups))
	for i, g := range n.Groups {
		if plans[i], err = s.layout.Plan(ns.id, g.ID, text, g.Geometry); err != nil {
			return nil, fmt.Errorf("store: group %d of %s: %w", g.ID, n.Model, err)
		}
	}
	for _, r := range s.roots {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := r.keep(namespacesDir, digest, []byte(text)); err != nil {
			return nil, err
		}
		for _, p := range plans {
			if err := r.keep(plansDir, p.Digest(), p.Encoded()); err != nil {
				return nil, err
			}
		}
	}
	return s.open(ns, n, plans)
}

// open completes a namespace's classes. The caller holds Store.opening; readers have no Space for it yet.
func (s *Store) open(ns *namespace, n *chunk.Namespace, plans []*chunk.Plan) (*Space, error) {
	s.spaces.mu.Lock()
	defer s.spaces.mu.Unlock()
	for i, g := range n.Groups {
		c, err := s.spaces.classOf(ns, g.ID)
		if err != nil {
			return nil, err
		}
		c.plan, c.lookup = plans[i], g.Lookup
		c.ranks = 1<<n.Ranks() - 1
		c.dataOffset = dataOffset(len(plans[i].Extents()))
		c.piece.Store(c.dataOffset + padded(plans[i].PayloadBytes()))
	}
	ns.space = &Space{ID: ns.id, Digest: ns.digest, ns: ns}
	return ns.space, nil
}
