package catalog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sync/semaphore"
)

// MaxNamespaces is the maximum number of namespaces that one run can number.
const MaxNamespaces = 4096

// Roots are the roots in which the catalog stores files that a later run needs to read pieces.
type Roots interface {
	// Keep writes a file durably to every root that takes stores. The other roots write the files of [Catalog.Files] before
	// they take stores again.
	Keep(dir, base string, data []byte) error
	// Forget removes a file from every root that has no other use for it. It logs failures.
	Forget(dir, base string)
}

// Options configure the catalog of a store.
type Options struct {
	Log         *slog.Logger
	Now         func() time.Time
	Seed        uint64
	Capacity    uint64 // capacity of all roots together, for admit policies
	Policies    Policies
	Expiry      func(text string) time.Duration // returns the time to live of a namespace's entries; 0 means that they do not expire
	Compression codec.Modes
	Roots       Roots
	AdmitFault  func(error) // called when an admit policy fails; must not call the catalog
}

// Catalog holds the namespaces of one store. It is safe for concurrent use.
type Catalog struct {
	classTable
	opt     Options
	log     *slog.Logger
	Tenants *Tenants

	Compression codec.Set
	Plans       sync.Map // plans of earlier layouts under which pieces were read, by digest

	admit  atomic.Pointer[Bindings[*policy.Admit]]
	layout atomic.Pointer[Bindings[*policy.Layout]]
	place  atomic.Pointer[Bindings[*policy.Place]]

	facts atomic.Pointer[[]abi.RootFacts] // facts about the roots; nil before they are open

	opening *semaphore.Weighted // held while namespaces are opened or policies change

	mu           sync.Mutex
	byDigest     map[kv.Digest]*Namespace
	unregistered map[kv.Digest]string // texts of namespaces without a number that roots hold
	unreadable   map[kv.Digest]error  // errors of texts in roots that could not be read

	endedMu sync.Mutex // taken after any other lock
	ended   []*Class   // classes without users that have not been reaped
	reap    chan struct{}
}

// New opens the policies that are bound to namespaces. Each takes a reference to its handle until Close.
func New(ctx context.Context, opt Options) (_ *Catalog, err error) {
	c := &Catalog{
		opt: opt, log: opt.Log, Tenants: newTenants(), opening: semaphore.NewWeighted(1), reap: make(chan struct{}, 1),
		byDigest: map[kv.Digest]*Namespace{}, unregistered: map[kv.Digest]string{},
		unreadable: map[kv.Digest]error{},
	}
	c.list.Store(new([]*Class))
	c.Compression.Modes = opt.Compression
	p := &opt.Policies
	c.admit.Store(&Bindings[*policy.Admit]{})
	c.layout.Store(&Bindings[*policy.Layout]{})
	c.place.Store(&Bindings[*policy.Place]{})
	first, err := c.PrepareRebind(ctx, p, 0)
	if err != nil {
		first.Abandon()
		return nil, errors.Join(err, c.Close())
	}
	first.Commit()
	return c, nil
}

func (c *Catalog) Close() error {
	c.reapClasses()
	return errors.Join(c.place.Load().close(), c.layout.Load().close(), c.admit.Load().close())
}

// Run reaps ended classes until the context is done.
func (c *Catalog) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.reap:
			c.reapClasses()
		}
	}
}

// Lock prevents namespaces from being opened and policies from being changed.
func (c *Catalog) Lock(ctx context.Context) error { return c.opening.Acquire(ctx, 1) }

func (c *Catalog) Unlock() { c.opening.Release(1) }

// SetRoots gives the place policies new facts about the roots.
func (c *Catalog) SetRoots(facts []abi.RootFacts) {
	c.facts.Store(&facts)
	for b := range c.place.Load().Each() {
		b.Now().Policy.SetRoots(facts)
	}
}

// announce tells the policies of a namespace about it.
func (c *Catalog) announce(ns *Namespace) error {
	acting := ns.Place.Now()
	if err := acting.Policy.Namespace(ns.ID, ns.Text); errors.Is(err, policy.ErrNamespace) {
		return err
	} else if err != nil { // the policy is down: new pieces get built-in names, and its next instance is told
		c.log.Warn("place policy was not told of a namespace yet", "policy", acting.Label,
			"namespace", ns.Digest, "error", err)
	}
	if err := ns.Admit.Now().Policy.Namespace(ns.ID, ns.Text); err != nil {
		c.opt.AdmitFault(err)
	}
	return nil
}

// Files calls visit for every file that each root must hold, until visit fails. Lock must be held.
func (c *Catalog) Files(visit func(dir, base string, data []byte) error) error {
	for _, ns := range c.Namespaces() {
		c.mu.Lock()
		plans := ns.plans()
		c.mu.Unlock()
		if err := ns.files(visit, plans); err != nil {
			return fmt.Errorf("namespace %s: %w", ns.Digest, err)
		}
	}
	return nil
}

// PolicyInfo describes an open policy, for statistics.
type PolicyInfo struct {
	*policy.Handle
	Since time.Time
	Stats policy.Stats
}

// EachPolicy calls visit for each open policy of the roles admit, place and layout.
func (c *Catalog) EachPolicy(visit func(PolicyInfo)) {
	c.admit.Load().visit(visit)
	c.place.Load().visit(visit)
	c.layout.Load().visit(visit)
}

var (
	// ErrUnknownNamespace means that no session has opened a namespace and no root has its text, or that the namespace lacks a
	// group.
	ErrUnknownNamespace = errors.New("unknown namespace or group")
	// ErrTooMany means that there are more namespaces or groups than one host can number.
	ErrTooMany = errors.New("too many namespaces or groups")
	// ErrNoPolicy means that no policy with that name has the role.
	ErrNoPolicy = errors.New("no such policy")
	// ErrAlien means that a piece cannot belong to the namespace that it names.
	ErrAlien = errors.New("piece of another namespace than it says")
)
