package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/policy"
)

// naming is a place policy and the files that it named: a generation of names. An entry's class leads to the one that its
// files were named by, so a path is worked out by the module that made it, also after another has taken over. A naming
// that no namespace is bound to any more ends with the last entry of its classes; see [class].
type naming struct {
	*bound
	id    string // of module and settings: the same in the next run; empty for one that is linked in
	store *Store
	seed  uint64
	place *policy.Place
	refs  atomic.Int64 // classes, and one while it is chosen for new pieces
}

func (s *Store) openNaming(ctx context.Context) func(*bound) (*naming, error) {
	return s.openNamingWith(ctx, s.cfg.Seed)
}

func (s *Store) openNamingWith(ctx context.Context, seed uint64) func(*bound) (*naming, error) {
	return func(b *bound) (*naming, error) {
		p, err := b.Module.NewPlace(ctx, policy.PlaceOptions{Seed: seed, Config: b.Config, MaxNamespaces: maxNamespaces})
		if err != nil {
			return nil, err
		}
		n := &naming{bound: b.hold(), place: p, store: s, seed: seed}
		if digest := b.Module.Digest(); len(digest) == hex.EncodedLen(sha256.Size) {
			sum := sha256.Sum256([]byte(fmt.Sprintf("%s\n%d\n%s", digest, seed, b.Config.Text())))
			n.id = hex.EncodeToString(sum[:16])
		}
		n.refs.Store(1)
		return n, nil
	}
}

func (n *naming) drop() {
	if n.refs.Add(-1) == 0 {
		n.store.unkeep(n)
		n.end()
	}
}

func (n *naming) end() {
	_ = n.place.Close() // it never fails
	n.release()
}

// A class is what an index entry names in two bytes: a group of a namespace, under one naming and one layout plan. When
// either is swapped, new pieces get a new class; the old one lasts for as long as it has entries. All classes of a group
// have the fingerprints of the first, its base, and lookups compare that: they find the entries of all.

// hold keeps a class from ending; it is false when that has happened.
func (c *class) hold() bool {
	for {
		n := c.refs.Load()
		if n == 0 {
			return false
		}
		if c.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// drop may be called with any lock held: what follows a class's end is the janitor's work.
func (c *class) drop() {
	if c.refs.Add(-1) > 0 {
		return
	}
	t := c.in
	t.ended.Lock()
	t.over = append(t.over, c)
	t.ended.Unlock()
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

// bury ends namings and frees the numbers of classes that are over, until the context is done.
func (s *Store) bury(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.spaces.kick:
			s.buryNow()
		}
	}
}

func (s *Store) buryNow() {
	t := s.spaces
	t.ended.Lock()
	over := t.over
	t.over = nil
	t.ended.Unlock()
	for _, c := range over {
		t.mu.Lock()
		t.forget(c)
		t.mu.Unlock()
		c.names.drop()
	}
}

// forget takes a class that is over out of its namespace. Its number can be given again, unless it is a base: those are
// what lookups in flight compare. The caller holds t.mu.
func (t *spaces) forget(c *class) {
	list := c.ns.all[:0]
	for _, o := range c.ns.all {
		if o != c {
			list = append(list, o)
		}
	}
	c.ns.all = list
	if c.id != c.base {
		t.free = append(t.free, c.id)
	}
}

// identity is 32 bytes that tell this naming from others in the next run.
func (n *naming) identity() []byte {
	if n.id != "" {
		return []byte(n.id)
	}
	sum := sha256.Sum256([]byte(n.Name + "\n" + n.Module.Digest() + "\n" + n.Config.Text()))
	return sum[:]
}
