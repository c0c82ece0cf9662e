package store

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/shadow"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/evictor"
	"golang.org/x/sync/semaphore"
)

// Shadow is an evict policy that decides nothing: it hears all requests and evicts from an imaginary cache.
type Shadow struct {
	Policy   *policy.Handle // borrowed
	Capacity int64          // of the imaginary cache; 0: of the roots together
}

// runningShadow is a shadow with its policy.
type runningShadow struct {
	*evictor.Policy
	shadow *shadow.Shadow
}

// shadows are the running ones, with the stream of requests that they hear.
type shadows struct {
	stream shadow.Stream
	// changing is held while the store's policies change; the list is replaced, never changed.
	changing *semaphore.Weighted
	running  atomic.Pointer[[]*runningShadow]
}

// AddShadow starts a shadow. Its name must be unique among the shadows.
func (s *Store) AddShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, false) }

// SwapShadow starts a shadow in place of the one that has its name. When that fails the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error { return s.startShadow(ctx, h, true) }

func (s *Store) startShadow(ctx context.Context, h Shadow, swap bool) error {
	p := s.evictPolicy(h.Policy)
	capacity := h.Capacity
	if capacity == 0 {
		for _, r := range s.cfg.Roots {
			capacity += r.Capacity
		}
	}
	options := policy.EvictOptions{MaxSlots: slotsFor(capacity), Capacity: uint64(capacity), Seed: s.cfg.Seed, Config: p.Config}
	err := s.shadows.start(ctx, p, options, swap, &s.closed)
	if err != nil {
		p.Release()
		return fmt.Errorf("store: shadow %s: %w", p.Label, err)
	}
	return nil
}

// RemoveShadow ends a shadow.
func (s *Store) RemoveShadow(name string) error { return s.shadows.remove(name) }

func (l *shadows) start(
	ctx context.Context, p *evictor.Policy, options policy.EvictOptions, swap bool, closed *atomic.Bool,
) error {
	if err := l.changing.Acquire(ctx, 1); err != nil {
		return err
	}
	defer l.changing.Release(1)
	if closed.Load() {
		return ErrClosed
	}
	list := slices.Clone(l.list())
	i := slices.IndexFunc(list, func(t *runningShadow) bool { return t.Label == p.Label })
	switch {
	case swap && i < 0:
		return ErrNoPolicy
	case !swap && i >= 0:
		return fmt.Errorf("%w: there is one of that name", ErrConfig)
	}
	h, err := shadow.Start(ctx, p.Module, options)
	if err != nil {
		return err
	}
	next := &runningShadow{p, h}
	if !swap {
		list = append(list, next)
		l.running.Store(&list)
		l.stream.Add(h)
		return nil
	}
	old := list[i]
	list[i] = next
	l.running.Store(&list)
	l.stream.Add(h)
	l.end(old)
	return nil
}

func (l *shadows) remove(name string) error {
	_ = l.changing.Acquire(context.Background(), 1) // never ends
	defer l.changing.Release(1)
	list := slices.Clone(l.list())
	i := slices.IndexFunc(list, func(t *runningShadow) bool { return t.Label == name })
	if i < 0 {
		return fmt.Errorf("%w: shadow %s", ErrNoPolicy, name)
	}
	removed := list[i]
	list = slices.Delete(list, i, i+1)
	l.running.Store(&list)
	l.end(removed)
	return nil
}

// list returns the running shadows. The caller must not change it.
func (l *shadows) list() []*runningShadow {
	if list := l.running.Load(); list != nil {
		return *list
	}
	return nil
}

func (l *shadows) end(t *runningShadow) {
	l.stream.Remove(t.shadow)
	t.shadow.Close()
	t.Release()
}

func (l *shadows) close() {
	_ = l.changing.Acquire(context.Background(), 1) // never ends
	defer l.changing.Release(1)
	for _, t := range l.list() {
		l.end(t)
	}
	l.running.Store(nil)
}

// listener passes a lookup on to the shadows.
type listener struct {
	stream *shadow.Stream
	batch  *shadow.Batch // nil: there are no shadows
	step   shadow.Step   // what all keys have in common
}

func (l *shadows) listener(q *LookupRequest, c *catalog.Class, now uint64) (w listener) {
	if l.stream.On() {
		w = listener{stream: &l.stream, batch: l.stream.Batch()}
		w.step = shadow.Step{
			Op: shadow.Ask, Time: now, Request: q.Request, Tenant: q.Tenant, First: true,
			ByPrefix: c.Lookup == chunk.ByPrefix,
		}
	}
	return w
}

func (w *listener) add(step shadow.Step) {
	w.batch = w.stream.Step(w.batch, step)
	w.step.First = false
}

// hit is called with the lock of the root that has the entry.
func (w *listener) hit(r *root, slot uint32, fp uint64) {
	step, e := w.step, r.Index.At(slot)
	step.Key, step.Parent, step.Size, step.Depth, step.Hit = fp, e.Parent(), r.Index.EntryUnits(slot, e), e.Depth(), true
	w.add(step)
}

func (w *listener) miss(fp uint64) {
	step := w.step
	step.Key = fp
	w.add(step)
}

// rest is for the keys after the first miss, which the lookup itself has no need to look at.
func (w *listener) rest(c *catalog.Class, keys []chunk.Key) {
	for i := range keys {
		w.miss(chunk.Fingerprint(c.Namespace.Digest, c.Group, keys[i]))
	}
	w.stream.Send(w.batch)
}

// offer tells the shadows of a chunk that a client wants to store, whether or not it is stored.
func (l *shadows) offer(p *Put, q *PutRequest, now uint64) {
	if !l.stream.On() {
		return
	}
	l.stream.Send(l.stream.Step(l.stream.Batch(), shadow.Step{
		Op: shadow.Offer, Key: p.mark.Fingerprint, Time: now,
		Parent: chunk.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent),
		Size:   uint32(p.entryBytes() / abi.SizeUnit), Depth: q.Depth, Request: q.Request, Tenant: q.Tenant,
	}))
}

// endRequest tells the shadows that a request has ended.
func (l *shadows) endRequest(request uint32, hints abi.Hints, now uint64) {
	if l.stream.On() {
		l.stream.Send(l.stream.Step(l.stream.Batch(), shadow.EndStep(request, hints, now)))
	}
}
