package store

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/shadow"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/evictor"
)

// Shadow is an evict policy that decides nothing: it hears all requests, and evicts from an imaginary cache.
type Shadow struct {
	Policy   *policy.Handle // borrowed
	Capacity int64          // of the imaginary cache; 0: of the roots together
}

// trial is a shadow at work.
type trial struct {
	*evictor.Policy
	shadow *shadow.Shadow
}

// AddShadow starts one. Its name is its own among the shadows.
func (s *Store) AddShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, false) }

// SwapShadow starts one in the place of the one that has its name, which goes on when that fails.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, true) }

func (s *Store) startShadow(ctx context.Context, h Shadow, swap bool) error {
	b := s.evictPolicy(h.Policy)
	err := s.addShadow(ctx, b, h.Capacity, swap)
	if err != nil {
		b.Release()
		return fmt.Errorf("store: shadow %s: %w", b.Label, err)
	}
	return nil
}

func (s *Store) addShadow(ctx context.Context, b *evictor.Policy, capacity int64, swap bool) error {
	if err := s.swapping.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.swapping.Release(1)
	if s.closed.Load() {
		return ErrClosed
	}
	i := slices.IndexFunc(s.onTrial(), func(t *trial) bool { return t.Label == b.Label })
	switch {
	case swap && i < 0:
		return ErrNoPolicy
	case !swap && i >= 0:
		return fmt.Errorf("%w: there is one of that name", ErrConfig)
	}
	if capacity == 0 {
		for _, r := range s.cfg.Roots {
			capacity += r.Capacity
		}
	}
	h, err := shadow.Start(ctx, b.Module, policy.EvictOptions{
		MaxSlots: slotsFor(capacity), Capacity: uint64(capacity), Seed: s.cfg.Seed, Config: b.Config,
	})
	if err != nil {
		return err
	}
	list := slices.Clone(s.onTrial())
	if !swap {
		list = append(list, &trial{b, h})
		s.trials.Store(&list)
		s.stream.Add(h)
		return nil
	}
	old := list[i]
	list[i] = &trial{b, h}
	s.trials.Store(&list)
	s.stream.Add(h)
	old.end(s)
	return nil
}

// RemoveShadow ends one.
func (s *Store) RemoveShadow(name string) error {
	_ = s.swapping.Acquire(context.Background(), 1) // that never ends
	defer s.swapping.Release(1)
	list := slices.Clone(s.onTrial())
	i := slices.IndexFunc(list, func(t *trial) bool { return t.Label == name })
	if i < 0 {
		return fmt.Errorf("%w: shadow %s", ErrNoPolicy, name)
	}
	t := list[i]
	list = slices.Delete(list, i, i+1)
	s.trials.Store(&list)
	t.end(s)
	return nil
}

// onTrial is the shadows at work, for anybody to read.
func (s *Store) onTrial() []*trial {
	if list := s.trials.Load(); list != nil {
		return *list
	}
	return nil
}

func (t *trial) end(s *Store) {
	s.stream.Remove(t.shadow)
	t.shadow.Close()
	t.Release()
}

func (s *Store) endTrials() {
	_ = s.swapping.Acquire(context.Background(), 1) // that never ends
	defer s.swapping.Release(1)
	for _, t := range s.onTrial() {
		t.end(s)
	}
	s.trials.Store(nil)
}

// listener tells the shadows of a lookup.
type listener struct {
	stream *shadow.Stream
	batch  *shadow.Batch // nil: nobody listens
	step   shadow.Step   // what all keys have in common
}

func (s *Store) listener(q *LookupRequest, c *catalog.Class, now uint64) (w listener) {
	if s.stream.On() {
		w = listener{stream: &s.stream, batch: s.stream.Batch()}
		w.step = shadow.Step{Op: shadow.Ask, Time: now, Request: q.Request, Tenant: q.Tenant, First: true, ByPrefix: c.Lookup == chunk.ByPrefix}
	}
	return w
}

func (w *listener) add(step shadow.Step) {
	w.batch = w.stream.Step(w.batch, step)
	w.step.First = false
}

// hit is called with the lock of the root that has the entry.
func (w *listener) hit(r *root, slot uint32, print uint64) {
	step, e := w.step, r.x.At(slot)
	step.Key, step.Parent, step.Size, step.Depth, step.Hit = print, e.Parent(), r.x.EntryUnits(slot, e), e.Depth(), true
	w.add(step)
}

func (w *listener) miss(print uint64) {
	step := w.step
	step.Key = print
	w.add(step)
}

// rest is for the keys after the first miss, which the lookup itself has no need to look at.
func (w *listener) rest(c *catalog.Class, keys []chunk.Key) {
	for i := range keys {
		w.miss(chunk.Fingerprint(c.Namespace.Digest, c.Group, keys[i]))
	}
	w.stream.Send(w.batch)
}

// offered tells the shadows of a chunk that is to be stored, whatever becomes of that.
func (s *Store) offered(p *Put, q *PutRequest) {
	if !s.stream.On() {
		return
	}
	s.stream.Send(s.stream.Step(s.stream.Batch(), shadow.Step{
		Op: shadow.Offer, Key: p.mark.print, Parent: chunk.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent), Time: s.clock(),
		Size: uint32(p.entryBytes() / abi.SizeUnit), Depth: q.Depth, Request: q.Request, Tenant: q.Tenant,
	}))
}
