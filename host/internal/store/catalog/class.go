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
	Base      uint16 // ID of the group's first class
	Namespace *Namespace
	Group     uint32
	Printer   kv.Printer
	Lookup    kv.Lookup
	Ranks     uint64 // all ranks of the namespace, as bits
	Plan      *kv.Plan

	catalog   *Catalog
	refs      atomic.Int64 // number of entries and of puts without an entry yet, plus one while the class is used for new pieces
	fileBytes atomic.Int64
}

// FileBytes returns the largest size of a piece file under the plan, which is the size that is reserved for a piece. It is 0
// until a session has opened the namespace. In contrast to Plan, it may be called at any time.
func (cl *Class) FileBytes() int64 { return cl.fileBytes.Load() }

// Bound returns the largest size of a piece file in any layout. A layout other than this host's may have a gap before each
// page. Until a session has opened the namespace, the bound is based on the largest possible payload.
func (cl *Class) Bound() int64 { return 2 * cmp.Or(cl.FileBytes(), kv.MaxPayload) }

// IsPiece reports whether a header belongs to this piece.
func (cl *Class) IsPiece(h *pieceformat.Header, k *kv.Key, rank uint32) bool {
	return h.IsOf(cl.Namespace.Digest, cl.Group, k, rank)
}

// acquire takes a reference. It returns false if the class has ended.
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

// Ref takes a further reference. The caller must have one already.
func (cl *Class) Ref() { cl.refs.Add(1) }

// Release returns a reference. It may be called with any lock held: ended classes are reaped by [Catalog.Run].
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

// setPlan sets the layout plan of the class.
func (cl *Class) setPlan(plan *kv.Plan) {
	cl.Plan = plan
	cl.fileBytes.Store(pieceformat.MostBytes(plan))
}

// classTable numbers classes. Reading it needs no lock.
type classTable struct {
	list atomic.Pointer[[]*Class]
	free []uint16 // numbers of ended classes; guarded by Catalog.mu
}

// Class returns the class with a number.
func (t *classTable) Class(id uint16) *Class { return (*t.list.Load())[id] }

// Base returns the base of the class with a number.
func (t *classTable) Base(id uint16) uint16 { return t.Class(id).Base }

// Fingerprint returns the fingerprint of a key in a class.
func (t *classTable) Fingerprint(id uint16, k kv.Key) uint64 {
	cl := t.Class(id)
	return cl.Printer.Print(&k)
}

// add gives a class a number. Catalog.mu must be held.
func (t *classTable) add(cl *Class) error {
	list := *t.list.Load()
	switch n := len(t.free); {
	case n > 0:
		cl.ID, t.free = t.free[n-1], t.free[:n-1]
		list = slices.Clone(list) // readers may still use the old list
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

// Classes returns the classes that have not been reaped.
func (c *Catalog) Classes() (list []*Class) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ns := range c.byDigest {
		list = append(list, ns.classes...)
	}
	return list
}

// ClassFor returns the class for a piece in a root, given the piece's header.
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

// classOf returns the class of new pieces of a group, and creates it if necessary. c.mu must be held.
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

// newClass creates a class with the plan of the group's current class. The caller owns the only reference. c.mu must be held.
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

// setCurrent makes a class the one that new pieces of its group get. The namespace takes over the caller's reference. c.mu must
// be held.
func (c *Catalog) setCurrent(cl *Class) {
	groups := maps.Clone(*cl.Namespace.current.Load())
	old := groups[cl.Group]
	groups[cl.Group] = cl
	cl.Namespace.current.Store(&groups)
	if old != nil {
		old.Release()
	}
}

// reapClasses frees the numbers of ended classes.
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

// removeClass removes an ended class from its namespace. Its number is reused unless it is a base, because running lookups
// compare bases. c.mu must be held.
func (c *Catalog) removeClass(cl *Class) {
	ns := cl.Namespace
	ns.classes = slices.DeleteFunc(slices.Clone(ns.classes), func(o *Class) bool { return o == cl })
	if cl.ID != cl.Base {
		c.free = append(c.free, cl.ID)
	}
}

// AppendBuiltin appends the built-in name of a piece, which is its path below the root.
func (cl *Class) AppendBuiltin(dst []byte, key *kv.Key, rank uint32) []byte {
	return pieceformat.AppendBuiltin(dst, cl.Namespace.Digest, cl.Namespace.KeyLen, key, cl.Group, rank)
}

// Builtin returns the built-in name of a piece.
func (cl *Class) Builtin(key *kv.Key, rank uint32) string {
	var room [builtinRoom]byte
	return string(cl.AppendBuiltin(room[:0], key, rank))
}

// NameOf returns the name of a piece. list holds the names of its entry that are not built-in ones.
func (cl *Class) NameOf(list []pieceformat.Name, key *kv.Key, rank uint32) string {
	if path, ok := pieceformat.NameOf(list, rank); ok {
		return path
	}
	return cl.Builtin(key, rank)
}

// builtinRoom is the size of a buffer that fits any built-in name.
const builtinRoom = 160

// asking is the memory for one call of a place policy.
type asking struct {
	query abi.PlaceQuery
	path  []byte
}

var askings = sync.Pool{New: func() any { return &asking{path: make([]byte, 0, pieceformat.MaxPath)} }}

// Ask asks the namespace's place policy for the name of a new piece. size is the size of the entry. The name is empty if the
// piece gets the built-in name, as it does after every error. root is the root that the policy chose, or [abi.None]. The policy
// is not asked again about this piece, so the caller must store the answer.
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
			break // otherwise the policy was replaced during the call: ask its successor
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
