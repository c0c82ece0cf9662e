package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// Namespace opens a namespace: the same one gives the same pointer. Its text and its plans are durable in every root
// before it returns, because a restart can make nothing of a piece without them.
func (s *Store) Namespace(ctx context.Context, n *chunk.Namespace) (*catalog.Namespace, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if s.closed.Load() {
		return nil, ErrClosed
	}
	ns, err := s.catalog.Open(ctx, n)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return ns, nil
}

// Claims says whether a path below a root is one that a policy of this store gives to a piece, or gave once. A scan
// leaves damaged files with other paths alone and does not count them.
func (s *Store) Claims(rel string) bool { return s.catalog.Claims(rel) }

// loadNamespaces reads the texts of namespaces that a root holds.
func (r *root) loadNamespaces() error {
	list, err := r.FS.ReadDir(r.Path + "/" + pieceformat.NamespacesDir)
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.Path, err)
	}
	for _, e := range list {
		d, err := chunk.ParseDigest(e.Name())
		if err != nil || r.store.catalog.Knows(d) {
			continue
		}
		text, err := r.kept.Text(d)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			r.Log.Error("namespace left out, its pieces are left alone; run fsck", "namespace", d, "error", err)
		}
		r.store.catalog.AddText(d, string(text), err)
	}
	return nil
}

// loadOldPlacePolicies opens the place policies of earlier runs. Files of one that cannot be opened get new names.
func (s *Store) loadOldPlacePolicies(ctx context.Context) error {
	for _, r := range s.roots {
		if r.unavailable.Load() {
			continue
		}
		list, err := r.FS.ReadDir(r.Path + "/" + pieceformat.PoliciesDir)
		if err != nil {
			if err = s.openWithout(ctx, r, fmt.Errorf("store: root %s: %w", r.Path, err)); err != nil {
				return err
			}
			continue
		}
		for _, e := range list {
			id, ok := strings.CutSuffix(e.Name(), pieceformat.PlaceSuffix)
			if !ok || s.catalog.HasGeneration(id) || strings.HasPrefix(id, ".") {
				continue
			}
			text, err := r.kept.Read(pieceformat.PoliciesDir + "/" + e.Name())
			if err == nil {
				err = s.catalog.AddOldGeneration(ctx, r.Path+"/"+pieceformat.PoliciesDir, text)
			}
			if err != nil {
				s.log.Warn("earlier place policy cannot be opened; its files get new names", "root", r.Path,
					"policy", id, "error", err)
			}
		}
	}
	return s.catalog.KeepGenerations()
}
