package plugintest

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Measure is the cost of one kind of work for a module, and for the built-in policy in the same run.
type Measure struct {
	What    string `json:"what"` // that the figures are for one of
	Module  Cost   `json:"module"`
	Builtin Cost   `json:"builtin"` // lru, admit-default, fanout or layermajor, native
}

// Cost is the cost of one unit of work: the lowest of several rounds, which alternate between the module and the
// built-in policy.
type Cost struct {
	Nanos  float64 `json:"ns"`
	Allocs float64 `json:"allocs"` // in the host
	Fuel   float64 `json:"fuel"`   // 0 when native
}

// work is one kind of work. do does n units of it.
type work struct {
	what  string
	n     int
	do    func() error
	stats func() policy.Stats
}

// rounds is the number of rounds for each side.
const rounds = 9

// Bench measures a module in each of its roles. Nothing else should run meanwhile.
func Bench(ctx context.Context, path string, o Options) (out []Measure, err error) {
	if o.Slots == 0 {
		o.Slots = 1 << 16
	}
	m, err := policy.Open(ctx, path, o.policy())
	if err != nil {
		return nil, err
	}
	defer m.Close(context.WithoutCancel(ctx))
	makers := [abi.Roles]func(context.Context, *policy.Module, Options) ([]work, func() error, error){
		abi.RoleEvict: evictWork, abi.RoleAdmit: admitWork, abi.RolePlace: placeWork, abi.RoleLayout: layoutWork,
	}
	for role := range abi.Roles {
		if !m.Has(role) {
			continue
		}
		own, end, err := makers[role](ctx, m, o)
		if err != nil {
			return nil, err
		}
		plain := o
		plain.Config = nil // the module's own
		builtin, endBuiltin, err := makers[role](ctx, policy.Builtin(role), plain)
		if err != nil {
			return nil, errors.Join(err, end())
		}
		for i := range own {
			measure := Measure{What: own[i].what}
			for range rounds {
				if err = errors.Join(own[i].round(&measure.Module), builtin[i].round(&measure.Builtin), ctx.Err()); err != nil {
					return nil, errors.Join(err, end(), endBuiltin())
				}
			}
			out = append(out, measure)
		}
		if err := errors.Join(end(), endBuiltin()); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// round does the work once and records the cost if it is the lowest so far.
func (w *work) round(best *Cost) error {
	var before, after runtime.MemStats
	fuel := w.stats().Fuel
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	err := w.do()
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	n := float64(w.n)
	if ns := float64(took.Nanoseconds()) / n; best.Nanos == 0 || ns < best.Nanos {
		*best = Cost{ns, float64(after.Mallocs-before.Mallocs) / n, float64(w.stats().Fuel-fuel) / n}
	}
	return err
}

// evictWork is a full root: touches in full batches, and evictions, each an ask with its REMOVE and INSERT.
func evictWork(ctx context.Context, m *policy.Module, o Options) ([]work, func() error, error) {
	e, err := m.NewEvict(ctx, policy.EvictOptions{MaxSlots: o.Slots, Capacity: uint64(o.Slots) * abi.SizeUnit,
		Seed: o.Seed, Config: o.Config})
	if err != nil {
		return nil, nil, err
	}
	rng := rand.New(rand.NewPCG(o.Seed, 53))
	const touches, evictions, prompt = 1 << 17, 1 << 13, 64
	now, request := uint64(0), uint32(0)
	// Each run of slots holds a prompt, chunk by chunk in its order.
	about := func(op abi.Op, slot uint32) abi.Event {
		ev := abi.Event{Op: op, Slot: slot, Parent: abi.None, Key: uint64(slot)<<1 | 1, Size: 1, Depth: slot % prompt,
			Request: request}
		if ev.Depth > 0 {
			ev.Parent, ev.ParentKey = slot-1, uint64(slot-1)<<1|1
		}
		return ev
	}
	tell := func(op abi.Op, slot uint32) error {
		now += 1000
		ev := about(op, slot)
		ev.Time = now
		return e.Event(ev)
	}
	for slot := range o.Slots {
		if slot%prompt == 0 {
			request++
		}
		err = errors.Join(err, tell(abi.OpInsert, slot))
	}
	var events []abi.Event
	for len(events) < touches {
		request++
		start := rng.Uint32N(1+o.Slots/prompt) * prompt
		if rng.IntN(4) > 0 {
			start = rng.Uint32N(1+o.Slots/prompt/16) * prompt // most requests are for few prompts
		}
		for slot := start; slot < min(start+8+rng.Uint32N(prompt-8), o.Slots); slot++ {
			events = append(events, about(abi.OpTouch, slot))
		}
		events = append(events, abi.Event{Op: abi.OpRequestEnd, Slot: abi.None, Parent: abi.None, Request: request})
	}
	victims := make([]uint32, 1)
	return []work{
		{"event", len(events), func() error {
			for i := range events {
				now += 1000
				events[i].Time = now
				if err := e.Event(events[i]); err != nil {
					return err
				}
			}
			return e.Flush()
		}, e.Stats},
		{"eviction", evictions, func() error {
			for range evictions {
				n, err := e.Victims(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: abi.None}, victims)
				for _, slot := range victims[:n] {
					err = errors.Join(err, tell(abi.OpRemove, slot), tell(abi.OpInsert, slot))
				}
				if err != nil {
					return err
				}
			}
			return e.Flush()
		}, e.Stats},
	}, e.Close, err
}

func admitWork(ctx context.Context, m *policy.Module, o Options) ([]work, func() error, error) {
	a, err := m.NewAdmit(ctx, policy.AdmitOptions{Capacity: uint64(o.Slots) * abi.SizeUnit, Seed: o.Seed,
		Config: o.Config})
	if err != nil {
		return nil, nil, err
	}
	err = a.Namespace(0, texts[6])
	rng := rand.New(rand.NewPCG(o.Seed, 59))
	batch, answers := make([]abi.Candidate, 16), make([]bool, 16)
	const n = 1 << 14
	return []work{{"candidate (16 in a call)", n, func() error {
		for range n / len(batch) {
			for i := range batch {
				batch[i] = abi.Candidate{Key: rng.Uint64N(1 << 16), Size: 512, Depth: uint32(i)}
			}
			if err := a.Admit(batch, answers); err != nil {
				return err
			}
		}
		return nil
	}, a.Stats}}, a.Close, err
}

func placeWork(ctx context.Context, m *policy.Module, o Options) ([]work, func() error, error) {
	p, err := m.NewPlace(ctx, policy.PlaceOptions{Seed: o.Seed, Config: o.Config})
	if err != nil {
		return nil, nil, err
	}
	err = p.Namespace(0, texts[6])
	p.SetRoots(facts()[1])
	rng := rand.New(rand.NewPCG(o.Seed, 61))
	const n = 1 << 13
	queries := make([]abi.PlaceQuery, n)
	for i := range queries {
		q := abi.PlaceQuery{KeyLen: 32, Size: 512, Rank: uint32(i % 8)}
		for j := range q.Key {
			q.Key[j] = byte(rng.Uint32())
		}
		queries[i] = q
	}
	buf := make([]byte, 0, mostPath)
	return []work{
		{"path", n, func() error {
			for i := range queries {
				if _, _, err := p.Path(&queries[i], buf); err != nil {
					return err
				}
			}
			return nil
		}, p.Stats},
	}, p.Close, err
}

func layoutWork(ctx context.Context, m *policy.Module, o Options) ([]work, func() error, error) {
	l, err := m.NewLayout(ctx, policy.LayoutOptions{Seed: o.Seed, Config: o.Config})
	if err != nil {
		return nil, nil, err
	}
	g := kv.Geometry{Blocks: 16}
	for i := range uint32(160) {
		g.Planes = append(g.Planes, kv.Plane{Layer: i / 2, Part: i % 2, PageBytes: 32 << 10})
	}
	const n = 64
	return []work{{"plan of 16 blocks and 160 planes", n, func() error {
		for range n {
			if _, err := l.Plan(0, 0, texts[6], g); err != nil {
				return err
			}
		}
		return nil
	}, l.Stats}}, l.Close, nil
}
