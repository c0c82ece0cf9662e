package fsck

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// names reads paths back: by the place policy that was given, and by the built-in one.
type names struct {
	given, builtin *policy.Place
	asked          bool // a place policy was given

	mu  sync.Mutex
	ids []chunk.Digest // of namespaces, by the id that the policies know them by
}

const maxNamespaces = 4096

func newNames(ctx context.Context, o *Options) (*names, error) {
	opt := policy.PlaceOptions{MaxNamespaces: maxNamespaces}
	n := &names{asked: o.Place != nil}
	var err error
	if n.builtin, err = policy.Builtin(abi.RolePlace).NewPlace(ctx, opt); err != nil {
		return nil, err
	}
	n.given = n.builtin
	if o.Place != nil {
		opt.Config = o.PlaceConfig
		if n.given, err = o.Place.NewPlace(ctx, opt); err != nil {
			n.builtin.Close()
			return nil, err
		}
	}
	return n, nil
}

func (n *names) close() {
	n.builtin.Close()
	if n.asked {
		n.given.Close()
	}
}

func (n *names) namespace(d chunk.Digest, text string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := uint32(len(n.ids))
	if id == maxNamespaces {
		return fmt.Errorf("%w: %d namespaces", errTooMany, id)
	}
	n.ids = append(n.ids, d)
	if err := n.builtin.Namespace(id, text); err != nil {
		return err
	}
	if n.asked {
		return n.given.Namespace(id, text)
	}
	return nil
}

// identity is what a path says that the file is.
func (n *names) identity(rel string) (abi.PathIdentity, bool) {
	if id, err := n.given.Identity([]byte(rel)); err == nil && id.Known == 1 {
		return id, true
	}
	if !n.asked {
		return abi.PathIdentity{}, false
	}
	id, err := n.builtin.Identity([]byte(rel))
	return id, err == nil && id.Known == 1
}

func (n *names) claims(rel string) bool {
	_, ok := n.identity(rel)
	return ok
}

// holds compares a header with what the file's name says, if it says anything.
func (n *names) holds(rel string, h *pieceformat.Header) error {
	id, ok := n.identity(rel)
	if !ok {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if int(id.Namespace) < len(n.ids) && n.ids[id.Namespace] == h.Namespace && id.Group == h.Group && id.Rank == h.Rank &&
		id.Key == h.Key {
		return nil
	}
	return fmt.Errorf("%w: key %s of group %d, rank %d, namespace %s; the name is that of key %x, group %d, rank %d",
		pieceformat.ErrWrongPiece, h.Key, h.Group, h.Rank, h.Namespace, id.Key, id.Group, id.Rank)
}

// misnamed says that neither place policy would look for the piece here. Without a policy to go by nobody can say.
func (n *names) misnamed(rel string) bool { return n.asked && !n.claims(rel) }

// modelOf is the model that a namespace's text names.
func modelOf(text string) string {
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, "model="); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
