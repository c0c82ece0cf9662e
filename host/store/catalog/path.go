package catalog

import (
	"errors"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
)

// pathWork is the memory of one call of a place policy.
type pathWork struct {
	query   abi.PlaceQuery
	queries []abi.PlaceQuery
	names   policy.PathList
	path    []byte
}

// Paths computes the paths of pieces. It is safe for concurrent use.
type Paths struct {
	builtin *policy.Place
	work    sync.Pool // of *pathWork
}

func newPaths(builtin *policy.Place) *Paths {
	return &Paths{builtin: builtin, work: sync.Pool{New: func() any { return &pathWork{path: make([]byte, 0, 512)} }}}
}

// Path is a piece's path below its root, and the root that the policy chose, or index.None. builtin asks for the
// built-in name.
func (p *Paths) Path(cl *Class, k *chunk.Key, rank uint32, size int64, builtin bool) (string, uint32, error) {
	return p.by(p.placer(cl, builtin), "", cl, k, rank, size)
}

// PathIn is a piece's path with a prefix.
func (p *Paths) PathIn(prefix string, cl *Class, k *chunk.Key, rank uint32, builtin bool) (string, error) {
	path, _, err := p.by(p.placer(cl, builtin), prefix, cl, k, rank, 0)
	return path, err
}

// Verify asks a generation again for a path that it gave to a piece of a class before. A policy that gives another one
// is disqualified, which the error says.
func (p *Paths) Verify(g *PlaceGeneration, cl *Class, k *chunk.Key, rank uint32, path string) error {
	return g.Policy.Verify(&abi.PlaceQuery{
		Namespace: cl.Namespace.ID, Group: cl.Group, Rank: rank, KeyLen: cl.Namespace.KeyLen, Key: *k,
	}, []byte(path))
}

// Missed counts a piece that is not at the path below its root that its place policy says. The error says that the policy
// is in quarantine, so that the piece may have another name: one that does not repeat the names it gave is disqualified.
func (p *Paths) Missed(cl *Class, k *chunk.Key, rank uint32, path string) error {
	g := cl.Place
	if g.Policy.Quarantined() {
		return policy.ErrQuarantine
	}
	if err := p.Verify(g, cl, k, rank, path); errors.Is(err, policy.ErrImpure) {
		return err
	}
	g.Missing()
	return nil
}

func (p *Paths) placer(cl *Class, builtin bool) *policy.Place {
	if builtin {
		return p.builtin
	}
	return cl.Place.Policy
}

func (p *Paths) by(
	place *policy.Place, prefix string, cl *Class, k *chunk.Key, rank uint32, size int64,
) (string, uint32, error) {
	w := p.work.Get().(*pathWork)
	defer p.work.Put(w)
	w.query = abi.PlaceQuery{
		Namespace: cl.Namespace.ID, Group: cl.Group, Rank: rank, KeyLen: cl.Namespace.KeyLen,
		Size: uint32(size / abi.SizeUnit), Key: *k,
	}
	w.path = append(w.path[:0], prefix...)
	path, root, err := place.Path(&w.query, w.path)
	if err != nil {
		return "", index.None, err
	}
	return string(path), root, nil
}

// Claims says whether a path below a root is one that a policy of this store gives to a piece, or gave once. A scan
// leaves damaged files with other paths alone and does not count them.
func (c *Catalog) Claims(rel string) bool {
	knows := func(p *policy.Place) bool {
		id, err := p.Identity([]byte(rel))
		return err == nil && id.Known == 1
	}
	if knows(c.Paths.builtin) {
		return true
	}
	for b := range c.place.Load().Each() {
		if knows(b.Now().Policy) {
			return true
		}
	}
	for _, g := range c.old.all() {
		if knows(g.Policy) {
			return true
		}
	}
	return false
}
