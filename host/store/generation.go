package store

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// A naming outlives the run that it acted in: its files are still there after a restart, and so must be what names them.
// Each root keeps the module and its settings for every naming that may have files in it.
// keptNaming is the text of such a file.
type keptNaming struct {
	Name   string        `json:"name"`
	Seed   uint64        `json:"seed"`
	Config policy.Config `json:"config,omitempty"`
	Module policy.Pin    `json:"module"`
}

// keepNaming makes a naming durable in every root that takes stores, before the first file gets a name from it. The others
// catch up before they do again.
func (s *Store) keepNaming(n *naming) error {
	for _, r := range s.roots {
		if !r.health.Takes() {
			continue
		}
		if err := r.keepNaming(n); err != nil && r.health.Takes() {
			return err
		}
	}
	return nil
}

func (r *root) keepNaming(n *naming) error {
	if n.id == "" {
		return nil // linked in: it is there whenever the store is
	}
	module, pin := n.Module.Source()
	text, err := json.MarshalIndent(keptNaming{n.Name, n.seed, n.Config, pin}, "", "  ")
	if err == nil {
		err = r.keepAs(pieceformat.PoliciesDir, pin.SHA256+pieceformat.ModuleSuffix, module)
	}
	if err == nil {
		err = r.keepAs(pieceformat.PoliciesDir, n.id+pieceformat.PlaceSuffix, text)
	}
	return err
}

// namings are those that name new pieces, and those whose pieces are there.
func (s *Store) namings() (list []*naming) {
	s.place.each(func(o *office[naming]) { list = append(list, o.now.Load()) })
	for _, c := range s.spaces.live() {
		if !slices.Contains(list, c.names) {
			list = append(list, c.names)
		}
	}
	return list
}

// recall opens the namings of earlier runs. Files of one that cannot be opened are renamed as today's policy wants it.
func (s *Store) recall(ctx context.Context) error {
	have := map[string]bool{}
	var earlier []*naming
	defer func() { s.earlier.Store(&earlier) }()
	s.place.each(func(o *office[naming]) { have[o.now.Load().id] = true })
	for _, r := range s.roots {
		if r.unavailable.Load() {
			continue
		}
		list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.PoliciesDir)
		if err != nil {
			if err = s.openWithout(ctx, r, fmt.Errorf("store: root %s: %w", r.dir, err)); err != nil {
				return err
			}
			continue
		}
		for _, e := range list {
			id, ok := strings.CutSuffix(e.Name(), pieceformat.PlaceSuffix)
			if !ok || have[id] || strings.HasPrefix(id, ".") {
				continue
			}
			n, err := s.reopen(ctx, r, id)
			if err != nil {
				s.log.Warn("an earlier place policy cannot be opened; its files get new names", "root", r.dir, "policy", id, "error", err)
				continue
			}
			have[id] = true
			earlier = append(earlier, n)
		}
	}
	var err error
	s.place.each(func(o *office[naming]) {
		if err == nil {
			err = s.keepNaming(o.now.Load())
		}
	})
	return err
}

func (s *Store) reopen(ctx context.Context, r *root, id string) (*naming, error) {
	text, err := r.readMeta(r.dir + "/" + pieceformat.PoliciesDir + "/" + id + pieceformat.PlaceSuffix)
	if err != nil {
		return nil, err
	}
	var k keptNaming
	if err := json.Unmarshal(text, &k); err != nil || filepath.Base(k.Module.SHA256) != k.Module.SHA256 || k.Module.SHA256 == "" {
		return nil, fmt.Errorf("%w: %w", pieceformat.ErrDamaged, err)
	}
	m, err := policy.Open(ctx, r.dir+"/"+pieceformat.PoliciesDir+"/"+k.Module.SHA256+pieceformat.ModuleSuffix, k.Module.Options(s.cfg.Policies.Reopen))
	if err != nil {
		return nil, err
	}
	done := func() { _ = m.Close(context.Background()) }
	n, err := s.openNamingWith(ctx, k.Seed)(s.bind(abi.RolePlace, Use{Name: k.Name, Module: m, Config: k.Config, Done: done}))
	if err != nil {
		done()
	}
	return n, err
}

// formerly are the namings of earlier runs, while what they named is looked for.
func (s *Store) formerly() []*naming {
	if list := s.earlier.Load(); list != nil {
		return *list
	}
	return nil
}

// settleNamings ends those of earlier runs that have no files any more, once all have been found.
func (s *Store) settleNamings() {
	list := s.earlier.Swap(nil)
	t := s.spaces
	t.mu.Lock()
	found := s.found
	s.found = nil
	t.mu.Unlock()
	for _, c := range found {
		c.drop()
	}
	if list != nil {
		for _, n := range *list {
			n.drop()
		}
	}
	s.buryNow()
}

// classNamed is the class of a group under the naming of an earlier run with this identity; nil when there is none.
func (s *Store) classNamed(c *class, identity []byte) (*class, error) {
	for _, n := range s.formerly() {
		if string(n.identity()) == string(identity) {
			return s.classUnder(c, n)
		}
	}
	return nil, nil
}

// classUnder is the class of a group under an earlier naming.
func (s *Store) classUnder(c *class, n *naming) (*class, error) {
	t := s.spaces
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range c.ns.all {
		if o.group == c.group && o.names == n {
			return o, nil
		}
	}
	o, err := t.newClass(c.ns, c.group, n)
	if err == nil {
		s.found = append(s.found, o)
	}
	return o, err
}

// earlierClass finds the naming of an earlier run, or one that was replaced and still has entries, that gives a piece the
// path it has, and the piece's class under it. The class has a reference that is the caller's.
func (s *Store) earlierClass(c *class, h *pieceformat.Header, rel string) *class {
	named := func(n *naming) bool {
		name, _, err := s.names.by(n.place, "", c, &h.Key, h.Rank, 0)
		return err == nil && name == rel
	}
	for _, n := range s.formerly() {
		if !named(n) {
			continue
		}
		if found, err := s.classUnder(c, n); err == nil && found.hold() {
			return found
		}
	}
	var found *class
	for _, o := range s.spaces.others(c) {
		if found == nil && named(o.names) {
			found = o
		} else {
			o.drop()
		}
	}
	return found
}

// others are a group's classes beside one of them, each with a reference.
func (t *spaces) others(c *class) (list []*class) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range c.ns.all {
		if o.group == c.group && o.names != c.names && o.hold() {
			list = append(list, o)
		}
	}
	return list
}

// unkeep removes what the roots keep of a naming that has ended. A shared root's other hosts may have files of it.
func (s *Store) unkeep(n *naming) {
	if n.id == "" {
		return
	}
	used := false // its module, under other settings
	for _, o := range s.namings() {
		used = used || o != n && o.Module.Digest() == n.Module.Digest()
	}
	for _, r := range s.roots {
		r.custody.forget(r.dir + "/" + pieceformat.PoliciesDir + "/" + n.id + pieceformat.PlaceSuffix)
		if !used {
			r.custody.forget(r.dir + "/" + pieceformat.PoliciesDir + "/" + n.Module.Digest() + pieceformat.ModuleSuffix)
		}
	}
}
