package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/lru"
)

// evictors of a history: modules and their twins, one that hands its state over, and some that misbehave.
var historyEvictors = []string{"lru", "fifo", "native lru", "native fifo", "elephant", "liar", "miser", "wrecker"}

func (h *history) evictor(name string, rng *rand.Rand) *Use {
	native := func(make func(guest.Info) (any, error)) *Use {
		return &Use{Name: name, Module: policy.NativeModule(name, []abi.Role{abi.RoleEvict}, make)}
	}
	switch seed := rng.Uint64(); name {
	case "lru", "fifo":
		return use(h, name, nil, nil)
	case "native lru":
		return native(func(i guest.Info) (any, error) { return lru.New(i) })
	case "native fifo":
		return native(func(i guest.Info) (any, error) { return fifo.New(i) })
	case "elephant":
		return &Use{Name: name, Module: newElephant()}
	default:
		return native(func(i guest.Info) (any, error) {
			p, err := lru.New(i)
			return &rogue{Policy: p, how: name, slots: i.MaxSlots, rng: rand.New(rand.NewPCG(seed, 4))}, err
		})
	}
}

// rogue is lru, but for its answers: a liar names slots that are not there, or not to be evicted; a miser names none now and
// then; a wrecker answers what no policy may, and is replaced.
type rogue struct {
	*lru.Policy
	how   string
	slots uint32
	rng   *rand.Rand
}

func (r *rogue) Victims(ask abi.Ask, dst []uint32) int {
	n := r.Policy.Victims(ask, dst)
	switch {
	case r.how == "liar":
		seen := map[uint32]bool{}
		for i := range dst[:min(n+2, len(dst))] {
			if i >= n || r.rng.IntN(2) == 0 {
				dst[i] = r.rng.Uint32N(r.slots)
			}
			if seen[dst[i]] {
				return i
			}
			seen[dst[i]] = true
		}
		return min(n+2, len(dst))
	case r.how == "miser" && r.rng.IntN(3) == 0:
		return 0
	case r.how == "wrecker" && r.rng.IntN(5) == 0:
		return len(dst) + 1
	}
	return n
}

// Save and Load hide lru's: what a rogue knows is its own.
func (r *rogue) Save([]byte, int) ([]byte, error) { return nil, errors.New("not me") }
func (r *rogue) Load([]byte) error                { return errors.New("not me") }

// placers of a history: generations of names, one that gives many keys one name, and one that gives none now and then.
var historyPlacers = []string{"1/1/1", "4/4", "2/2", "collider", "mute"}

// drawPlacer leaves the collider out where power is lost: a file that this damages under a name that nobody can read back is
// nobody's to a scan, left alone and not counted, like any other program's.
func (h *history) drawPlacer(rng *rand.Rand) string {
	list := historyPlacers
	if h.kind.power {
		list = slices.DeleteFunc(slices.Clone(list), func(name string) bool { return name == "collider" })
	}
	return list[rng.IntN(len(list))]
}

func (h *history) placer(name string, rng *rand.Rand) *Use {
	switch name {
	case "collider", "mute":
		return &Use{Name: name, Module: policy.NativeModule(name, []abi.Role{abi.RolePlace}, func(i guest.Info) (any, error) {
			p, err := fanout.New(i)
			return &roguePlacer{fanout: p, how: name}, err
		})}
	default:
		return use(h, "fanout", nil, policy.Config{fanout.ConfigWidths: name})
	}
}

// roguePlacer gives some keys the name of others, or one that leads out of the root.
type roguePlacer struct {
	fanout guest.Placer
	how    string
}

func (r *roguePlacer) Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if r.how == "collider" {
		return fmt.Appendf(dst, "heap/%02x_r%d.kv", q.Key[0]%8, q.Rank), abi.None
	}
	if q.Key[0]%3 == 0 {
		return append(dst, "../../out.kv"...), abi.None
	}
	return r.fanout.Place(q, roots, dst)
}

func (r *roguePlacer) Unplace(path []byte) abi.PathIdentity { return abi.PathIdentity{} }

// waryAdmitter refuses some keys.
type waryAdmitter struct{ part uint64 }

func (a waryAdmitter) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		dst[i] = batch[i].Key%5 >= a.part
	}
}

// counted counts a policy until the store gives it back.
func (h *history) counted(u *Use) *Use {
	var over atomic.Bool
	done := u.Done
	h.uses.Add(1)
	u.Done = func() {
		if done != nil {
			done()
		}
		if over.Swap(true) {
			h.Errorf("policy %s was given back twice", u.Name)
		}
		h.done.Add(1)
	}
	return u
}

func (p *party) swap(role abi.Role, u *Use) string {
	w := Swap{}
	if role != abi.RoleEvict {
		w.From = role.String() // as drawPolicies calls them
	}
	u = p.h.counted(u)
	w.Uses[role] = u
	_, err := p.store.Swap(context.Background(), w)
	if err != nil && !acceptable(err) && !p.h.kind.many {
		p.Errorf("host %s: %s policy %s for %s: %v", p.cfg.HostID, role, u.Name, w.From, err)
	}
	return fmt.Sprintf("%s: %v", u.Name, err)
}

func (p *party) swapEvict(rng *rand.Rand) string {
	return p.swap(abi.RoleEvict, p.h.evictor(historyEvictors[rng.IntN(len(historyEvictors))], rng))
}

func (p *party) swapPlace(rng *rand.Rand) string {
	name := p.h.drawPlacer(rng)
	return name + ": " + p.swap(abi.RolePlace, p.h.placer(name, rng))
}

func (p *party) swapLayout(rng *rand.Rand) string {
	if rng.IntN(2) == 0 {
		return p.swap(abi.RoleLayout, &Use{Module: policy.Builtin(abi.RoleLayout)})
	}
	return p.swap(abi.RoleLayout, &Use{Module: policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(guest.Info) (any, error) { return blockMajor{}, nil })})
}

func (p *party) swapAdmit(rng *rand.Rand) string {
	part := uint64(rng.IntN(2))
	return p.swap(abi.RoleAdmit, &Use{Module: policy.NativeModule(fmt.Sprintf("wary%d", part), []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return waryAdmitter{part}, nil })})
}

// drawPolicies chooses those of the host's next life.
func (p *party) drawPolicies(rng *rand.Rand) {
	opt, err := workshop()
	if err != nil {
		p.Fatal(err)
	}
	p.cfg.Policies = Policies{Admit: Use{Name: "admit"}, Place: Use{Name: "place"}, Layout: Use{Name: "layout"}}
	p.cfg.Policies.Reopen.Cache = opt.Cache
	if rng.IntN(2) == 0 {
		p.cfg.Policies.Evict = *p.h.evictor(historyEvictors[rng.IntN(len(historyEvictors))], rng)
	}
	if p.h.kind.hosts == 1 && rng.IntN(2) == 0 {
		p.cfg.Policies.Place = *p.h.placer(p.h.drawPlacer(rng), rng)
	}
	p.cfg.Policies.Place.Name = "place"
	for _, u := range []*Use{&p.cfg.Policies.Evict, &p.cfg.Policies.Place} {
		if u.Module != nil {
			*u = *p.h.counted(u)
		}
	}
}
