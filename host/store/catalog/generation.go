package catalog

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// PlaceGeneration is a place policy and the files that it named. One that no namespace is bound to any more ends with
// the last entry of its classes. It outlives the run: each root keeps the module and the settings of every generation
// that may have files in it.
type PlaceGeneration struct {
	*policy.Handle
	Policy *policy.Place
	Since  time.Time
	id     string // of module and settings: the same in the next run; empty for a policy that is linked in
	seed   uint64
	refs   atomic.Int64 // classes, and one while the policy is bound

	missing atomic.Int64 // pieces that were not where the policy said, since somebody looked where they are
}

// doubtAt is how many pieces may be missing before a place policy is doubted. Somebody may have removed files.
const doubtAt = 8

// Missing counts a piece that was not where the policy said, although it says so still.
func (g *PlaceGeneration) Missing() { g.missing.Add(1) }

// Doubted says whether so many pieces were missing that somebody should look where they are.
func (g *PlaceGeneration) Doubted() bool { return g.missing.Load() >= doubtAt }

// Looked ends a doubt.
func (g *PlaceGeneration) Looked() { g.missing.Store(0) }

// keptGeneration is the text of a generation's file.
type keptGeneration struct {
	Name   string        `json:"name"`
	Seed   uint64        `json:"seed"`
	Config policy.Config `json:"config,omitempty"`
	Module policy.Pin    `json:"module"`
}

func (o *Options) placeOpener(ctx context.Context, seed uint64) func(*policy.Handle) (*PlaceGeneration, error) {
	return func(h *policy.Handle) (*PlaceGeneration, error) {
		p, err := h.Module.NewPlace(ctx, policy.PlaceOptions{
			Seed: seed, Config: h.Config, MaxNamespaces: MaxNamespaces, Quarantined: o.PlaceQuarantined,
		})
		if err != nil {
			return nil, err
		}
		g := &PlaceGeneration{Handle: h.Acquire(), Policy: p, Since: o.Now(), seed: seed}
		if digest := h.Module.Digest(); len(digest) == hex.EncodedLen(sha256.Size) {
			sum := sha256.Sum256([]byte(fmt.Sprintf("%s\n%d\n%s", digest, seed, h.Config.Text())))
			g.id = hex.EncodeToString(sum[:16])
		}
		g.refs.Store(1)
		return g, nil
	}
}

// Identity tells this generation from others, also in the next run.
func (g *PlaceGeneration) Identity() (id [32]byte) {
	if g.id != "" {
		copy(id[:], g.id)
		return id
	}
	return sha256.Sum256([]byte(g.Label + "\n" + g.Module.Name() + "\n" + g.Module.Digest() + "\n" + g.Config.Text()))
}

func (g *PlaceGeneration) handle() *policy.Handle { return g.Handle }

func (g *PlaceGeneration) close() {
	_ = g.Policy.Close() // it never fails
	g.Release()
}

// files calls visit for the files that each root keeps of a generation.
func (g *PlaceGeneration) files(visit func(dir, base string, data []byte) error) error {
	if g.id == "" {
		return nil // linked in: it is there whenever the store is
	}
	module, pin := g.Module.Source()
	text, err := json.MarshalIndent(keptGeneration{g.Label, g.seed, g.Config, pin}, "", "  ")
	if err == nil {
		err = visit(pieceformat.PoliciesDir, pin.SHA256+pieceformat.ModuleSuffix, module)
	}
	if err == nil {
		err = visit(pieceformat.PoliciesDir, g.id+pieceformat.PlaceSuffix, text)
	}
	return err
}

// Generations are those that name new pieces and those whose pieces are there.
func (c *Catalog) Generations() (list []*PlaceGeneration) {
	for b := range c.place.Load().Each() {
		list = append(list, b.Now())
	}
	for _, cl := range c.Classes() {
		if !slices.Contains(list, cl.Place) {
			list = append(list, cl.Place)
		}
	}
	return list
}

// Entries counts the entries whose files a generation named, and the puts that are about to make one.
func (c *Catalog) Entries(g *PlaceGeneration) (entries int64) {
	for _, cl := range c.Classes() {
		if cl.Place == g {
			entries += cl.refs.Load()
			if cl.Namespace.Class(cl.Group) == cl {
				entries--
			}
		}
	}
	return max(0, entries)
}

// releaseGeneration gives back a reference to a generation. After the last one to any of the same module and settings the
// roots forget it.
func (c *Catalog) releaseGeneration(g *PlaceGeneration) {
	if g.refs.Add(-1) > 0 {
		return
	}
	defer g.close()
	if g.id == "" {
		return
	}
	used := false // its module, with other settings
	for _, o := range c.Generations() {
		if o != g && o.id == g.id { // bound twice, with another policy in between
			return
		}
		used = used || o != g && o.Module.Digest() == g.Module.Digest()
	}
	c.opt.Roots.Forget(pieceformat.PoliciesDir, g.id+pieceformat.PlaceSuffix)
	if !used {
		c.opt.Roots.Forget(pieceformat.PoliciesDir, g.Module.Digest()+pieceformat.ModuleSuffix)
	}
}

// oldGenerations are those of earlier runs, while their files are looked for.
type oldGenerations struct {
	list atomic.Pointer[[]*PlaceGeneration]
}

func (o *oldGenerations) all() []*PlaceGeneration {
	if list := o.list.Load(); list != nil {
		return *list
	}
	return nil
}

// HasGeneration says whether a generation is open: one of this run's bindings, or one of an earlier run.
func (c *Catalog) HasGeneration(id string) bool {
	for b := range c.place.Load().Each() {
		if b.Now().id == id {
			return true
		}
	}
	return slices.ContainsFunc(c.old.all(), func(g *PlaceGeneration) bool { return g.id == id })
}

// AddOldGeneration opens a generation of an earlier run from the text in one of dir's files. It is called at the start,
// by one goroutine.
func (c *Catalog) AddOldGeneration(ctx context.Context, dir string, text []byte) error {
	var k keptGeneration
	if err := json.Unmarshal(text, &k); err != nil || filepath.Base(k.Module.SHA256) != k.Module.SHA256 ||
		k.Module.SHA256 == "" {
		return fmt.Errorf("%w: %w", pieceformat.ErrDamaged, err)
	}
	m, err := policy.Open(ctx, dir+"/"+k.Module.SHA256+pieceformat.ModuleSuffix, k.Module.Options(c.opt.Policies.Reopen))
	if err != nil {
		return err
	}
	h := policy.NewHandle(m, k.Name, k.Config, nil)
	defer h.Release()
	g, err := c.opt.placeOpener(ctx, k.Seed)(h)
	if err != nil {
		return err
	}
	list := append(slices.Clip(c.old.all()), g)
	c.old.list.Store(&list)
	return nil
}

// KeepGenerations makes the generations of this run's bindings durable, before the first file gets a name from them.
func (c *Catalog) KeepGenerations() error {
	for b := range c.place.Load().Each() {
		if err := b.Now().files(c.opt.Roots.Keep); err != nil {
			return err
		}
	}
	return nil
}

// EndScan ends the generations of earlier runs that have no files any more. All files have been found.
func (c *Catalog) EndScan() {
	list := c.old.list.Swap(nil)
	c.mu.Lock()
	found := c.found
	c.found = nil
	c.mu.Unlock()
	for _, cl := range found {
		cl.Release()
	}
	if list != nil {
		for _, g := range *list {
			c.releaseGeneration(g)
		}
	}
	c.reapClasses()
}

// ClassNamed returns the class of a group under the generation of an earlier run with this identity; nil when there is
// none.
func (c *Catalog) ClassNamed(cl *Class, identity [32]byte) (*Class, error) {
	for _, g := range c.old.all() {
		if g.Identity() == identity {
			return c.classUnder(cl, g)
		}
	}
	return nil, nil
}

// classUnder is the class of a group under a generation of an earlier run.
func (c *Catalog) classUnder(cl *Class, g *PlaceGeneration) (*Class, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range cl.Namespace.classes {
		if o.Group == cl.Group && o.Place == g {
			return o, nil
		}
	}
	o, err := c.newClass(cl.Namespace, cl.Group, g)
	if err == nil {
		c.found = append(c.found, o)
	}
	return o, err
}

// ClassAt finds the generation, of an earlier run or replaced in this one, that gives a piece the path it has, and
// returns the piece's class under it with a reference for the caller; nil when there is none.
func (c *Catalog) ClassAt(cl *Class, h *pieceformat.Header, rel string) *Class {
	named := func(g *PlaceGeneration) bool {
		name, _, err := c.Paths.by(g.Policy, "", cl, &h.Key, h.Rank, 0)
		return err == nil && name == rel
	}
	for _, g := range c.old.all() {
		if !named(g) {
			continue
		}
		if found, err := c.classUnder(cl, g); err == nil && found.Acquire() {
			return found
		}
	}
	var found *Class
	for _, o := range cl.others() {
		if found == nil && named(o.Place) {
			found = o
		} else {
			o.Release()
		}
	}
	return found
}

// Names are the paths that a piece can have: from its class's place policy, the built-in one, and those of earlier runs or
// replaced in this one.
func (c *Catalog) Names(cl *Class, k *chunk.Key, rank uint32) (list []string) {
	add := func(p *policy.Place) {
		if name, _, err := c.Paths.by(p, "", cl, k, rank, 0); err == nil && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	add(cl.Place.Policy)
	add(c.Paths.builtin)
	for _, g := range c.old.all() {
		add(g.Policy)
	}
	for _, o := range cl.others() {
		add(o.Place.Policy)
		o.Release()
	}
	return list
}

// others are the classes of the group under other generations, each with a reference.
func (cl *Class) others() (list []*Class) {
	cl.catalog.mu.Lock()
	defer cl.catalog.mu.Unlock()
	for _, o := range cl.Namespace.classes {
		if o.Group == cl.Group && o.Place != cl.Place && o.Acquire() {
			list = append(list, o)
		}
	}
	return list
}
