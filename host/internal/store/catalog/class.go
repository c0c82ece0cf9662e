package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Class is a group of a namespace under one layout plan.
type Class struct {
	ID        uint16
	Base      uint16 // the ID of the group's first class
	Namespace *Namespace
	Group     uint32
	Printer   kv.Printer
	Lookup    kv.Lookup
	Ranks     uint64 // all ranks of the namespace
	Plan      *kv.Plan

	catalog   *Catalog
	refs      atomic.Int64 // entries, puts that have no entry yet, and one while new pieces get the class
	fileBytes atomic.Int64
}

// FileBytes is the most that one piece's file takes under the plan, and what is reserved for it; 0 until a session has
// opened the namespace. Unlike Plan it may be read without having opened the namespace.
func (cl *Class) FileBytes() int64 { return cl.fileBytes.Load() }

// Bound is the most that a piece's file may have in any layout: another than this host's may have a gap before each page. Until a
// session has opened the namespace it follows from the largest payload that there is.
func (cl *Class) Bound() int64 { return 2 * cmp.Or(cl.FileBytes(), kv.MaxPayload) }

// IsPiece says whether a header is of this piece.
func (cl *Class) IsPiece(h *pieceformat.Header, k *kv.Key, rank uint32) bool {
	return h.IsOf(cl.Namespace.Digest, cl.Group, k, rank)
}

// acquire takes a reference. It is false when the class has ended.
func (cl *Class) acquire() bool {
	for {
		n := cl.refs.Load()
		if n == 0 {
			return false
		}
		if cl.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Ref takes a reference for a caller that has one already.
func (cl *Class) Ref() { cl.refs.Add(1) }

// Release gives a reference back. It may be called with any lock held: an ended class is reaped by [Catalog.Run].
func (cl *Class) Release() {
	if cl.refs.Add(-1) > 0 {
		return
	}
	c := cl.catalog
	c.endedMu.Lock()
	c.ended = append(c.ended, cl)
	c.endedMu.Unlock()
	select {
	case c.reap <- struct{}{}:
	default:
	}
}

// setPlan gives a class the layout of its pieces.
func (cl *Class) setPlan(plan *kv.Plan) {
	cl.Plan = plan
	cl.fileBytes.Store(pieceformat.MostBytes(plan))
}

// classTable numbers classes. Reading needs no lock.
type classTable struct {
	list atomic.Pointer[[]*Class]
	free []uint16 // numbers of classes that have ended; guarded by Catalog.mu
}

// Class is the class with a number.
func (t *classTable) Class(id uint16) *Class { return (*t.list.Load())[id] }

// Base is the base of the class with a number.
func (t *classTable) Base(id uint16) uint16 { return t.Class(id).Base }

// Fingerprint is the fingerprint of a class's key.
func (t *classTable) Fingerprint(id uint16, k kv.Key) uint64 {
	cl := t.Class(id)
	return cl.Printer.Print(&k)
}

// add gives a class a number. Catalog.mu is held.
func (t *classTable) add(cl *Class) error {
	list := *t.list.Load()
	switch n := len(t.free); {
	case n > 0:
		cl.ID, t.free = t.free[n-1], t.free[:n-1]
		list = slices.Clone(list) // readers have the other
		list[cl.ID] = cl
	case len(list) > 1<<16-1:
		return fmt.Errorf("%w: %d groups of all namespaces", ErrTooMany, len(list))
	default:
		cl.ID = uint16(len(list))
		list = append(slices.Clip(list), cl)
	}
	t.list.Store(&list)
	return nil
}

// Classes are the classes that have not been reaped.
func (c *Catalog) Classes() (list []*Class) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ns := range c.byDigest {
		list = append(list, ns.classes...)
	}
	return list
}

// ClassFor returns the class of a piece of a namespace that some root holds.
func (c *Catalog) ClassFor(h *pieceformat.Header) (*Class, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ns, err := c.resolve(h.Namespace)
	if err != nil {
		return nil, err
	}
	for _, b := range h.Key[ns.KeyLen:] {
		if b != 0 {
			return nil, fmt.Errorf("%w: %w: key %s is longer than its namespace's %d bytes", pieceformat.ErrDamaged, ErrAlien,
				h.Key, ns.KeyLen)
		}
	}
	return c.classOf(ns, h.Group)
}

// classOf returns the class that new pieces of a group get. c.mu is held.
func (c *Catalog) classOf(ns *Namespace, group uint32) (*Class, error) {
	if cl := ns.Class(group); cl != nil {
		return cl, nil
	}
	cl, err := c.newClass(ns, group)
	if err != nil {
		return nil, err
	}
	c.setCurrent(cl)
	return cl, nil
}

// newClass makes a class with one reference, the caller's. It has the plan of the group's current class. c.mu is held.
func (c *Catalog) newClass(ns *Namespace, group uint32) (*Class, error) {
	cl := &Class{Namespace: ns, Group: group, Printer: kv.PrinterOf(ns.Digest, group), catalog: c}
	if err := c.add(cl); err != nil {
		return nil, err
	}
	cl.Base = cl.ID
	for _, o := range ns.classes {
		if o.Group == group {
			cl.Base, cl.Lookup, cl.Ranks = o.Base, o.Lookup, o.Ranks
		}
	}
	if plan := ns.Plan(group); plan != nil {
		cl.setPlan(plan)
	}
	cl.refs.Store(1)
	ns.classes = append(ns.classes, cl)
	return cl, nil
}

// setCurrent makes new pieces of a group get this class, and gives the class's reference to the namespace. c.mu is
// held.
func (c *Catalog) setCurrent(cl *Class) {
	groups := maps.Clone(*cl.Namespace.current.Load())
	old := groups[cl.Group]
	groups[cl.Group] = cl
	cl.Namespace.current.Store(&groups)
	if old != nil {
		old.Release()
	}
}

// reapClasses frees the numbers of classes that have ended.
func (c *Catalog) reapClasses() {
	c.endedMu.Lock()
	ended := c.ended
	c.ended = nil
	c.endedMu.Unlock()
	for _, cl := range ended {
		c.mu.Lock()
		c.removeClass(cl)
		c.mu.Unlock()
	}
}

// removeClass takes an ended class out of its namespace. Its number is used again unless it is a base: lookups under
// way compare those. c.mu is held.
func (c *Catalog) removeClass(cl *Class) {
	ns := cl.Namespace
	ns.classes = slices.DeleteFunc(slices.Clone(ns.classes), func(o *Class) bool { return o == cl })
	if cl.ID != cl.Base {
		c.free = append(c.free, cl.ID)
	}
}

// AppendBuiltin appends the built-in name of a piece: its path below the root.
func (cl *Class) AppendBuiltin(dst []byte, key *kv.Key, rank uint32) []byte {
	return pieceformat.AppendBuiltin(dst, cl.Namespace.Digest, cl.Namespace.KeyLen, key, cl.Group, rank)
}

// Builtin is the built-in name of a piece.
func (cl *Class) Builtin(key *kv.Key, rank uint32) string {
	var room [builtinRoom]byte
	return string(cl.AppendBuiltin(room[:0], key, rank))
}

// NameOf is the name of a piece, given those of its entry that are not built-in ones.
func (cl *Class) NameOf(list []pieceformat.Name, key *kv.Key, rank uint32) string {
	if path, ok := pieceformat.NameOf(list, rank); ok {
		return path
	}
	return cl.Builtin(key, rank)
}

// builtinRoom is room for a built-in name.
const builtinRoom = 160

// asking is the memory of one call of a place policy.
type asking struct {
	query abi.PlaceQuery
	path  []byte
}

var askings = sync.Pool{New: func() any { return &asking{path: make([]byte, 0, pieceformat.MaxPath)} }}

// Ask asks the namespace's place policy to name a piece that is about to be stored, of an entry of so many bytes. The name
// is empty where the piece gets the built-in one, which it does with every error, too. root is the one that the policy
// chose, or [abi.None]. The answer is a fact of the piece from then on: the policy is not asked again.
func (cl *Class) Ask(key *kv.Key, rank uint32, size int64) (name string, root uint32, err error) {
	w := askings.Get().(*asking)
	defer askings.Put(w)
	ns := cl.Namespace
	w.query = abi.PlaceQuery{
		Namespace: ns.ID, Group: cl.Group, Rank: rank, KeyLen: ns.KeyLen, Size: uint32(size / abi.SizeUnit), Key: *key,
	}
	for {
		p := ns.Place.Now()
		w.path, root, err = p.Policy.Path(&w.query, w.path[:0])
		if !errors.Is(err, policy.ErrClosed) || ns.Place.Now() == p {
			break // else its successor is asked
		}
	}
	if err != nil || len(w.path) == 0 {
		return "", root, err
	}
	var room [builtinRoom]byte
	switch {
	case string(w.path) == string(cl.AppendBuiltin(room[:0], key, rank)):
		return "", root, nil
	case pieceformat.Reserved(w.path):
		err := fmt.Errorf("%w: it gave the path %q, where built-in names of pieces are", policy.ErrFault, w.path)
		ns.Place.Now().Policy.Misnamed(err)
		return "", root, err
	}
	return string(w.path), root, nil
}
