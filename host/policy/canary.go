package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// canary has a fresh instance of each role do a little of its work, before the module is taken for one that can. What it
// says is thrown away, and so are the instances. A role that does not start without settings of its own is judged where
// it is given them.
func (m *Module) canary(ctx context.Context) error {
	c := *m.code
	c.counters = make([]atomic.Int64, len(m.manifest.Counters)) // what is counted here did not happen
	trial := &Module{
		name: m.name, digest: m.digest, manifest: m.manifest, known: m.known, roles: m.roles, code: &c,
		log: slog.New(slog.DiscardHandler),
	}
	defer trial.ending.Wait()
	for role, run := range [abi.Roles]func(context.Context, *Module) error{
		abi.RoleEvict: tryEvict, abi.RoleAdmit: tryAdmit, abi.RolePlace: tryPlace, abi.RoleLayout: tryLayout,
	} {
		if !m.Has(abi.Role(role)) {
			continue
		}
		err := run(ctx, trial)
		if errors.Is(err, ErrConfig) {
			m.log.Debug("a policy was not tried out: it wants settings", "role", abi.Role(role).String(), "error", err)
			continue
		}
		if err != nil {
			return fmt.Errorf("%w as %s: %w", ErrCanary, abi.Role(role), err)
		}
	}
	return nil
}

// The canary's world: a root of a few chains of chunks, of which half fit.
const (
	canarySlots = 32
	canaryChain = 8
	canarySize  = 16 // of an entry, in abi.SizeUnit
)

// canaryRoot is the host's side of the canary's root.
type canaryRoot struct {
	e        *Evict
	now      uint64
	request  uint32
	resident [canarySlots]bool
	pinned   [canarySlots]bool
}

func tryEvict(ctx context.Context, m *Module) error {
	e, err := m.NewEvict(ctx, EvictOptions{MaxSlots: canarySlots, Capacity: canarySlots * canarySize * abi.SizeUnit, Seed: 1})
	if err != nil {
		return err
	}
	defer e.Close()
	r := &canaryRoot{e: e}
	for slot := range uint32(canarySlots) { // some were there before
		op := abi.OpInsert
		if slot < canaryChain {
			op = abi.OpResident
		}
		if err := r.store(op, slot); err != nil {
			return err
		}
	}
	if err := r.e.Flush(); err != nil {
		return err
	}
	for round := range uint32(4) {
		if err := r.turn(round); err != nil {
			return err
		}
	}
	return nil
}

func (r *canaryRoot) send(op abi.Op, slot uint32) error {
	r.now += 1_000_000
	ev := abi.Event{Op: op, Slot: slot, Parent: abi.None, Request: r.request, Time: r.now}
	if slot < canarySlots {
		ev.Key, ev.Size, ev.Depth = canaryKey(slot), canarySize, slot%canaryChain
		if ev.Depth > 0 {
			ev.ParentKey = canaryKey(slot - 1)
			if r.resident[slot-1] {
				ev.Parent = slot - 1
			}
		}
		switch op {
		case abi.OpInsert, abi.OpResident:
			r.resident[slot] = true
		case abi.OpRemove:
			r.resident[slot], r.pinned[slot] = false, false
		case abi.OpPin, abi.OpUnpin:
			r.pinned[slot] = op == abi.OpPin
		}
	}
	return r.e.Event(ev)
}

func canaryKey(slot uint32) uint64 { return uint64(slot+1) * 0x9e3779b97f4a7c15 }

// store adds an entry; its child, if that is there, is linked.
func (r *canaryRoot) store(op abi.Op, slot uint32) error {
	err := r.send(op, slot)
	if child := slot + 1; err == nil && child%canaryChain != 0 && r.resident[child] {
		err = r.send(abi.OpLink, child)
	}
	return err
}

// turn is a request that finds one chain, while another request looks on, and then room made for what is missing.
func (r *canaryRoot) turn(round uint32) error {
	r.request = round + 1
	first := round * canaryChain % canarySlots
	for slot := first; slot < first+canaryChain; slot++ {
		if !r.resident[slot] {
			continue
		}
		for _, op := range []abi.Op{abi.OpTouch, abi.OpPin} {
			if err := r.send(op, slot); err != nil {
				return err
			}
		}
	}
	for _, most := range []uint32{1, 6} {
		if err := r.evict(abi.Ask{Bytes: uint64(most) * canarySize * abi.SizeUnit, MaxVictims: most, Tenant: abi.None}); err != nil {
			return err
		}
	}
	for slot := range uint32(canarySlots) {
		var err error
		switch {
		case r.pinned[slot]:
			err = r.send(abi.OpUnpin, slot)
		case !r.resident[slot] && slot%2 == 0:
			err = r.store(abi.OpInsert, slot)
		case !r.resident[slot]:
			err = r.send(abi.OpTouch, slot) // of no entry: to be ignored, like an op of a later version
		}
		if err != nil {
			return err
		}
	}
	if err := r.send(abi.OpRequestEnd+1, first); err != nil {
		return err
	}
	if err := r.send(abi.OpRequestEnd, abi.None); err != nil {
		return err
	}
	return r.evict(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: 1}) // of a tenant that has nothing
}

func (r *canaryRoot) evict(ask abi.Ask) error {
	var dst [canarySlots]uint32
	n, err := r.e.Victims(ask, dst[:])
	if err != nil {
		return err
	}
	for _, slot := range dst[:n] {
		if !r.resident[slot] || r.pinned[slot] {
			continue // which is no fault
		}
		if err := r.send(abi.OpRemove, slot); err != nil {
			return err
		}
	}
	return nil
}

func tryAdmit(ctx context.Context, m *Module) error {
	a, err := m.NewAdmit(ctx, AdmitOptions{Capacity: 1 << 30, Seed: 1})
	if err != nil {
		return err
	}
	defer a.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.in.namespace(0, canaryNamespace(0)); err != nil {
		return err
	}
	var batch [canarySlots]abi.Candidate
	for i := range batch {
		slot := uint32(i)
		batch[i] = abi.Candidate{Key: canaryKey(slot), Size: canarySize, Depth: slot % canaryChain, Request: 1, Time: uint64(i)}
		if batch[i].Depth > 0 {
			batch[i].ParentKey, batch[i].Flags = canaryKey(slot-1), abi.CandidateParentResident
		}
	}
	var dst [canarySlots]bool
	for _, n := range []int{1, canarySlots} {
		if err := a.ask(batch[:n], dst[:n]); err != nil {
			return err
		}
	}
	return nil
}

func tryLayout(ctx context.Context, m *Module) error {
	l, err := m.NewLayout(ctx, LayoutOptions{Seed: 1})
	if err != nil {
		return err
	}
	defer l.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	uneven := chunk.Uniform(3, 3, 1, 4096)
	uneven.Planes[1].PageBytes = 9000
	for id, g := range []chunk.Geometry{chunk.Uniform(16, 4, 2, 16384), uneven} {
		planes := make([]abi.Plane, len(g.Planes))
		for i, p := range g.Planes {
			planes[i] = abi.Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes}
		}
		h := abi.LayoutHeader{Namespace: uint32(id), Blocks: g.Blocks, Planes: uint32(len(planes))}
		if _, err := l.plan(h, planes, canaryNamespace(id), g); err != nil {
			return err
		}
	}
	return nil
}

func tryPlace(ctx context.Context, m *Module) error {
	p, err := m.NewPlace(ctx, PlaceOptions{Seed: 1})
	if err != nil {
		return err
	}
	defer p.Close()
	p.SetRoots([]abi.RootFacts{
		{Flags: abi.RootWritable, Capacity: 1 << 40, Free: 1 << 39, ReadBps: 5e9, WriteBps: 3e9},
		{ID: 1, Flags: abi.RootWritable, Capacity: 1 << 42, Free: 1 << 40},
	})
	for id := range 2 {
		if err := p.Namespace(uint32(id), canaryNamespace(id)); err != nil {
			return err
		}
	}
	seen := map[string]abi.PlaceQuery{}
	for n := range uint32(16) { // all that a path follows from, each in two values
		q := abi.PlaceQuery{Namespace: n & 1, Group: n >> 1 & 1, Rank: n >> 2 & 1, Size: canarySize, KeyLen: abi.KeyBytes}
		for i := range q.Key {
			q.Key[i] = byte(0xa7 * (uint32(i) + 1) >> (n >> 3 & 1))
		}
		path, _, err := p.Path(&q, nil)
		if err != nil {
			return err
		}
		if other, twice := seen[string(path)]; twice {
			return fmt.Errorf("%s gave %q twice: for %s and %s", abi.ExportPlace, path, query(&other), query(&q))
		}
		seen[string(path)] = q
	}
	for path, q := range seen {
		again, _, err := p.Path(&q, nil)
		if err == nil && !bytes.Equal(again, []byte(path)) {
			err = fmt.Errorf("%s gave %q and then %q for %s", abi.ExportPlace, path, again, query(&q))
		}
		if err != nil {
			return err
		}
		id, err := p.Identity(again)
		if err != nil {
			return err
		}
		if id.Known == 0 || id.Namespace != q.Namespace || id.Group != q.Group || id.Rank != q.Rank || id.Key != q.Key {
			return fmt.Errorf("%s does not read back %q, which %s gave for %s", abi.ExportUnplace, path, abi.ExportPlace, query(&q))
		}
	}
	return nil
}

func query(q *abi.PlaceQuery) string {
	return fmt.Sprintf("namespace %d, group %d, rank %d, key %x", q.Namespace, q.Group, q.Rank, q.Key[:q.KeyLen])
}

// canaryNamespace is a namespace's text as hosts write it.
func canaryNamespace(id int) string {
	n := chunk.Namespace{
		Model: fmt.Sprintf("canary/model-%d", id), Revision: "1", DType: "bfloat16", Engine: "kvhost",
		Groups: []chunk.Group{{Geometry: chunk.Uniform(16, 4, 2, 16384)}, {ID: 1, Geometry: chunk.Uniform(3, 3, 1, 4096)}},
	}
	return n.Text()
}
