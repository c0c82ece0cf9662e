package store

import (
	"context"
	"errors"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// namer turns identities into paths and back: by the place policy of an entry's class, and by the built-in one where that
// fails or gives one name to two pieces.
type namer struct {
	builtin *policy.Place
	pool    sync.Pool // of *nameWork
}

type nameWork struct {
	query   abi.PlaceQuery
	queries []abi.PlaceQuery
	names   policy.PathList
	path    []byte
}

func newNamer(ctx context.Context, cfg *Config) (n *namer, err error) {
	n = &namer{pool: sync.Pool{New: func() any { return &nameWork{path: make([]byte, 0, 512)} }}}
	n.builtin, err = policy.Builtin(abi.RolePlace).NewPlace(ctx, policy.PlaceOptions{Seed: cfg.Seed, MaxNamespaces: maxNamespaces})
	return n, err
}

// announce tells policies of a namespace. Earlier place policies may have named its files, too.
func (s *Store) announce(ns *namespace) error {
	if err := s.names.builtin.Namespace(ns.id, ns.text); err != nil {
		return err
	}
	acting := ns.place.now.Load()
	if err := acting.place.Namespace(ns.id, ns.text); errors.Is(err, policy.ErrNamespace) {
		return err
	} else if err != nil { // it is down: what is new gets the built-in names, and its next guest is told
		s.log.Warn("the place policy was not told of a namespace yet", "policy", acting.Name, "namespace", ns.digest, "error", err)
	}
	for _, n := range s.formerly() {
		if err := n.place.Namespace(ns.id, ns.text); err != nil {
			s.log.Warn("an earlier place policy refuses a namespace", "policy", n.Name, "namespace", ns.digest, "error", err)
		}
	}
	if err := ns.admit.now.Load().policy.Namespace(ns.id, ns.text); err != nil {
		s.admissionFault(err)
	}
	return nil
}

// name is a piece's path below its root, and the root that the policy chose or none.
func (n *namer) name(c *class, k *chunk.Key, rank uint32, size int64, builtin bool) (string, uint32, error) {
	return n.under("", c, k, rank, size, builtin)
}

// under is name with something in front.
func (n *namer) under(prefix string, c *class, k *chunk.Key, rank uint32, size int64, builtin bool) (string, uint32, error) {
	if builtin {
		return n.by(n.builtin, prefix, c, k, rank, size)
	}
	return n.by(c.names.place, prefix, c, k, rank, size)
}

// by asks a certain policy.
func (n *namer) by(place *policy.Place, prefix string, c *class, k *chunk.Key, rank uint32, size int64) (string, uint32, error) {
	w := n.pool.Get().(*nameWork)
	defer n.pool.Put(w)
	w.query = abi.PlaceQuery{
		Namespace: c.ns.id, Group: c.group, Rank: rank, KeyLen: c.ns.keyLen, Size: uint32(size / abi.SizeUnit), Key: *k,
	}
	w.path = append(w.path[:0], prefix...)
	path, root, err := place.Path(&w.query, w.path)
	if err != nil {
		return "", index.None, err
	}
	return string(path), root, nil
}

// path is a piece's absolute path in r.
func (r *files) path(c *class, k *chunk.Key, rank uint32, builtin bool) (string, error) {
	name, _, err := r.store.names.under(r.slash, c, k, rank, 0, builtin)
	return name, err
}

// Claims says whether a path below a root is one that a policy of this store gives to a piece, or gave once. A scan leaves
// damaged files under other paths alone and does not count them.
func (s *Store) Claims(rel string) bool {
	knows := func(p *policy.Place) bool {
		id, err := p.Identity([]byte(rel))
		return err == nil && id.Known == 1
	}
	known := knows(s.names.builtin)
	s.place.each(func(o *office[naming]) { known = known || knows(o.now.Load().place) })
	for _, n := range s.formerly() {
		known = known || knows(n.place)
	}
	return known
}

// ScratchName names a file for a trial in a root, given by its directory. It counts as a temporary of this host's, so what a
// host that was killed has left there goes when it opens the root again. Its bytes are the caller's to keep out of the root's
// capacity.
func (s *Store) ScratchName(root, what string) string {
	return pieceformat.TempName(root+"/"+pieceformat.MetaDir+"/"+what, s.cfg.HostID, s.seq.Add(1))
}

// writes says whether a temporary of this host is one that this run has made.
func (s *Store) writes(t pieceformat.Temp) bool { return t.Seq > s.firstSeq && t.Seq <= s.seq.Load() }
