package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// A policy is told of a namespace once, by a number below maxNamespaces, and may keep that for as long as it runs. So a number
// is never given again within a run, and at a start only namespaces get one that are there: with a piece in some root, or a
// session that opens them. The others that roots have kept are dormant until then, and once everything is found the roots
// forget them: a session that opens one later has the root keep it again.

// readTries is how often a namespace's text is read: an error that passes is not to cost what is in it.
const readTries = 3

// loadNamespaces reads the namespaces that a root has kept. Pieces of one whose text is there and cannot be read, or is
// damaged, are left alone: it is only a text that is missing that makes them nobody's.
func (r *root) loadNamespaces() error {
	list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.NamespacesDir)
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	t := r.store.spaces
	for _, e := range list {
		d, err := chunk.ParseDigest(e.Name())
		if err != nil || t.knows(d) {
			continue
		}
		text, err := r.readText(d)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			r.log.Error("namespace left out, and what is in it left alone; fsck says whether its text can be read", "namespace", d, "error", err)
		}
		t.mu.Lock()
		if t.dormant[d] = string(text); err != nil {
			delete(t.dormant, d)
			t.unread[d] = err
		}
		t.mu.Unlock()
	}
	return nil
}

func (r *root) readText(d chunk.Digest) (text []byte, err error) {
	for range readTries {
		text, err = r.readMeta(r.dir + "/" + pieceformat.NamespacesDir + "/" + d.String())
		if err == nil && chunk.TextDigest(text) != d {
			err = fmt.Errorf("%w: its digest is another", pieceformat.ErrDamaged)
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return text, err
}

// knows says whether a namespace has a number, or is dormant.
func (t *spaces) knows(d chunk.Digest) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byID[d] != nil || t.dormant[d] != ""
}

// namespaceOf finds one that some root has kept, and gives it a number if it has none. The caller holds spaces.mu.
func (s *Store) namespaceOf(d chunk.Digest) (*namespace, error) {
	t := s.spaces
	if ns := t.byID[d]; ns != nil {
		return ns, nil
	}
	text := t.dormant[d]
	if err := t.unread[d]; err != nil && text == "" {
		return nil, err
	}
	if text == "" {
		return nil, fmt.Errorf("%w: digest %s", ErrSpace, d)
	}
	ns, err := s.number(d, text)
	if err != nil {
		delete(t.dormant, d) // not again for each of its pieces; and the roots keep it
		t.unread[d] = err
		s.log.Warn("namespace left out", "namespace", d, "error", err)
	}
	return ns, err
}

// wake gives all that are dormant a number, as far as there are any, so that policies know what they have named. It says
// whether there was one.
func (s *Store) wake() (any bool) {
	t := s.spaces
	t.mu.Lock()
	defer t.mu.Unlock()
	for d := range t.dormant {
		if _, err := s.namespaceOf(d); err == nil {
			any = true
		}
	}
	return any
}

// forgetDormant lets the roots forget what has no piece in any of them. All has been found.
func (s *Store) forgetDormant(ctx context.Context) {
	if s.opening.Acquire(ctx, 1) != nil {
		return
	}
	defer s.opening.Release(1)
	t := s.spaces
	t.mu.Lock()
	dormant := t.dormant
	t.dormant = map[chunk.Digest]string{}
	t.mu.Unlock()
	for _, r := range s.roots {
		if r.blind || !r.health.Takes() {
			continue // another host may have use for it, or what could not be read
		}
		for d := range dormant {
			r.custody.forget(r.dir + "/" + pieceformat.NamespacesDir + "/" + d.String())
		}
	}
}
