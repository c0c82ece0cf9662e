package sim

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// placement chooses the level of what is new by a place policy: the levels are then roots that are equally near, and nothing moves
// between them.
type placement struct {
	*policy.Place
	facts []abi.RootFacts
	told  uint64 // when the policy was given facts
	query abi.PlaceQuery
}

func (h *hierarchy) openPlace(ctx context.Context, p *Policy, o Options) (err error) {
	opt := policy.PlaceOptions{Seed: o.Seed, Config: p.config}
	if o.Observe != nil {
		opt.Observe = func(c *policy.Call) error { c.Candidates = h.ask[:]; return o.Observe(c) }
	}
	h.place.query.KeyLen = abi.KeyBytes
	if h.place.Place, err = p.module.NewPlace(ctx, opt); err != nil {
		return err
	}
	return h.place.Namespace(0, "model="+h.w.Name+"\n")
}

// choose gives what was asked about to the root that the policy chooses, else to the one with most room.
func (h *hierarchy) choose() (root int, err error) {
	c, p := &h.ask[0], &h.place
	most := -1.0
	for n := range h.levels {
		f := &p.facts[n]
		f.Free = uint64(len(h.levels[n].free)) * uint64(c.Size) * abi.SizeUnit
		if share := float64(f.Free) / float64(f.Capacity); share > most {
			most, root = share, n
		}
	}
	if p.told == 0 || c.Time >= p.told+uint64(time.Second) { // as seldom as a host
		p.SetRoots(p.facts)
		p.told = max(1, c.Time)
	}
	p.query.Size = c.Size
	for i := range len(p.query.Key) / 8 {
		binary.LittleEndian.PutUint64(p.query.Key[8*i:], fingerprint(c.Key+uint64(i)))
	}
	_, chosen, err := p.Path(&p.query, nil)
	if chosen != abi.None {
		root = int(chosen)
	}
	return root, err
}
