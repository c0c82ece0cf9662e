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

// MaxNamespaces is the most namespaces that one run can number.
const MaxNamespaces = 4096

// Roots are the directories in which the catalog keeps what a later run needs to understand the files.
type Roots interface {
	// Keep writes a file durably in every root that takes stores. The other roots write what [Catalog.Files] lists
	// before they take stores again.
	Keep(dir, base string, data []byte) error
	// Forget removes a file from every root that has no other use for it, and logs what fails.
	Forget(dir, base string)
}

// Options are those of a store.
type Options struct {
	Log         *slog.Logger
	Now         func() time.Time
	Seed        uint64
	Capacity    uint64 // of all roots together: what admit policies get
	Policies    Policies
	Expiry      func(text string) time.Duration // the time to live of a namespace's entries; 0: they do not expire
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
	Plans       sync.Map // kv.Digest to *kv.Plan: plans of earlier layouts that pieces were read by

	admit  atomic.Pointer[Bindings[*policy.Admit]]
	layout atomic.Pointer[Bindings[*policy.Layout]]
	place  atomic.Pointer[Bindings[*policy.Place]]

	facts atomic.Pointer[[]abi.RootFacts] // of the roots; nil before they are open

	opening *semaphore.Weighted // held while namespaces are opened or policies change

	mu           sync.Mutex
	byDigest     map[kv.Digest]*Namespace
	unregistered map[kv.Digest]string // texts that roots hold, of namespaces without a number
	unreadable   map[kv.Digest]error  // why a text that is there is not among those

	endedMu sync.Mutex // taken after any other lock
	ended   []*Class   // without users, to be reaped
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

// Run reaps classes that have ended, until the context is done.
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

// Lock keeps namespaces from being opened and policies from being swapped.
func (c *Catalog) Lock(ctx context.Context) error { return c.opening.Acquire(ctx, 1) }

func (c *Catalog) Unlock() { c.opening.Release(1) }

// SetRoots gives the place policies fresh facts about the roots.
func (c *Catalog) SetRoots(facts []abi.RootFacts) {
	c.facts.Store(&facts)
	for b := range c.place.Load().Each() {
		b.Now().Policy.SetRoots(facts)
	}
}

// announce tells policies of a namespace.
func (c *Catalog) announce(ns *Namespace) error {
	acting := ns.Place.Now()
	if err := acting.Policy.Namespace(ns.ID, ns.Text); errors.Is(err, policy.ErrNamespace) {
		return err
	} else if err != nil { // it is down: new pieces get the built-in names, and its next instance is told
		c.log.Warn("place policy was not told of a namespace yet", "policy", acting.Label,
			"namespace", ns.Digest, "error", err)
	}
	if err := ns.Admit.Now().Policy.Namespace(ns.ID, ns.Text); err != nil {
		c.opt.AdmitFault(err)
	}
	return nil
}

// Files calls visit for every file that each root must hold, until visit fails. The caller holds Lock.
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

// PolicyInfo is a policy that is open, for statistics.
type PolicyInfo struct {
	*policy.Handle
	Since time.Time
	Stats policy.Stats
}

// EachPolicy calls visit for each policy: admit, place, layout.
func (c *Catalog) EachPolicy(visit func(PolicyInfo)) {
	c.admit.Load().visit(visit)
	c.place.Load().visit(visit)
	c.layout.Load().visit(visit)
}

var (
	// ErrUnknownNamespace is a namespace that no session has opened and no root has the text of, or a group that it lacks.
	ErrUnknownNamespace = errors.New("unknown namespace or group")
	// ErrTooMany is a namespace or group beyond those that one host can tell apart.
	ErrTooMany = errors.New("too many namespaces or groups")
	// ErrNoPolicy says that no policy of that name has the role.
	ErrNoPolicy = errors.New("no such policy")
	// ErrAlien is a piece that its namespace cannot have.
	ErrAlien = errors.New("piece of another namespace than it says")
)
