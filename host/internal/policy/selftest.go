package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// selfTest gives a new instance of each role a small amount of its work, before the module is accepted. The instances
// and their answers are discarded. A role that does not start without settings is not tested.
func (m *Module) selfTest(ctx context.Context) error {
	scratch := &Module{
		name: m.name, digest: m.digest, manifest: m.manifest, known: m.known, roles: m.roles, code: m.code.Scratch(),
		pages: m.pages, memory: m.memory, log: slog.New(slog.DiscardHandler),
	}
	defer scratch.code.Wait()
	for role, run := range [abi.Roles]func(context.Context, *Module) error{
		abi.RoleEvict: testEvict, abi.RoleAdmit: testAdmit, abi.RolePlace: testPlace, abi.RoleLayout: testLayout,
	} {
		if !m.Has(abi.Role(role)) {
			continue
		}
		err := run(ctx, scratch)
		if errors.Is(err, ErrConfig) {
			m.log.Debug("self-test of policy skipped: it needs settings", "role", abi.Role(role).String(), "error", err)
			continue
		}
		if err != nil {
			return fmt.Errorf("%w as %s: %w", ErrSelfTest, abi.Role(role), err)
		}
	}
	return nil
}

// The self-test has a root with a few chains of chunks, of which half fit.
const (
	testSlots = 32
	testChain = 8
	testSize  = 16 // size of an entry, in abi.SizeUnit
)

func testEvict(ctx context.Context, m *Module) error {
	e, err := m.NewEvict(ctx, EvictOptions{MaxSlots: testSlots, Capacity: testSlots * testSize * abi.SizeUnit, Seed: 1})
	if err != nil {
		return err
	}
	defer e.Close()
	r := &testRoot{e: e, set: NewResidents(e)}
	for n := range uint32(testSlots) { // the first chain was resident before the policy started
		op := abi.OpInsert
		if n < testChain {
			op = abi.OpResident
		}
		if err := r.insert(op, n); err != nil {
			return err
		}
	}
	if err := r.e.Flush(); err != nil {
		return err
	}
	for round := range uint32(4) {
		if err := r.round(round); err != nil {
			return err
		}
	}
	return nil
}

// testRoot is the host's side of the root. Its chunks have numbers.
type testRoot struct {
	e    *Evict
	set  *Residents
	last Cause
}

func testKey(n uint32) uint64 { return uint64(n+1) * 0x9e3779b97f4a7c15 }

// now returns the cause of the next event: a later time, the same request.
func (r *testRoot) now() Cause {
	r.last.Time += 1_000_000
	return r.last
}

func (r *testRoot) insert(op abi.Op, n uint32) error {
	e := Resident{Key: testKey(n), Size: testSize, Depth: n % testChain}
	if e.Depth > 0 {
		e.Parent = testKey(n - 1)
	}
	_, err := r.set.Insert(op, e, r.now())
	return err
}

// round makes a request that finds one chain, then evicts and stores the missing chunks.
func (r *testRoot) round(round uint32) error {
	r.last.Request = round + 1
	first := round * testChain % testSlots
	for n := first; n < first+testChain; n++ {
		slot, ok := r.set.Find(testKey(n))
		if !ok {
			continue
		}
		if err := r.set.Touch(slot, r.now()); err != nil {
			return err
		}
		if err := r.set.Pin(slot, r.now()); err != nil {
			return err
		}
	}
	for _, most := range []uint32{1, 6} {
		ask := abi.Ask{Bytes: uint64(most) * testSize * abi.SizeUnit, MaxVictims: most, Tenant: abi.None}
		if err := r.evict(ask); err != nil {
			return err
		}
	}
	for n := range uint32(testSlots) {
		slot, ok := r.set.Find(testKey(n))
		var err error
		switch {
		case ok && r.set.Pinned(slot):
			err = r.set.Unpin(slot, r.now())
		case !ok && n%2 == 0:
			err = r.insert(abi.OpInsert, n)
		}
		if err != nil {
			return err
		}
	}
	if err := r.ignored(first); err != nil {
		return err
	}
	if err := r.set.EndRequest(0, abi.Hints{}, r.now()); err != nil {
		return err
	}
	return r.evict(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: 1}) // a tenant without entries
}

// ignored sends events that a policy must ignore: touches of empty slots, and an op of a later version.
func (r *testRoot) ignored(first uint32) error {
	for slot := range uint32(testSlots) {
		if _, ok := r.set.At(slot); !ok {
			ev := abi.Event{Op: abi.OpTouch, Slot: slot, Parent: abi.None, Size: testSize, Request: r.last.Request,
				Time: r.now().Time}
			if err := r.e.Event(ev); err != nil {
				return err
			}
		}
	}
	return r.e.Event(abi.Event{
		Op: abi.OpRequestEnd + 1, Slot: first, Parent: abi.None, Request: r.last.Request, Time: r.now().Time,
	})
}

func (r *testRoot) evict(ask abi.Ask) error {
	var dst [testSlots]uint32
	_, err := r.set.Evict(r.e, ask, dst[:], r.now(), func() bool { return false })
	return err
}

func testAdmit(ctx context.Context, m *Module) error {
	a, err := m.NewAdmit(ctx, AdmitOptions{Capacity: 1 << 30, Seed: 1})
	if err != nil {
		return err
	}
	defer a.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.in.Namespace(0, testNamespace(0)); err != nil {
		return err
	}
	var batch [testSlots]abi.Candidate
	for i := range batch {
		slot := uint32(i)
		batch[i] = abi.Candidate{Key: testKey(slot), Size: testSize, Depth: slot % testChain, Request: 1, Time: uint64(i), From: abi.NoLevel}
		switch kind := abi.CandidateKind(i % 3); kind {
		case abi.KindDemotion:
			batch[i].Kind, batch[i].From, batch[i].To, batch[i].Hits = kind, 0, 1, slot%4
		case abi.KindPromotion:
			batch[i].Kind, batch[i].From, batch[i].To, batch[i].Hits = kind, 1, 0, 1+slot%4
		}
		if batch[i].Depth > 0 {
			batch[i].ParentKey, batch[i].Flags = testKey(slot-1), abi.CandidateParentResident
		}
	}
	var dst [testSlots]bool
	for _, n := range []int{1, testSlots} {
		if err := a.ask(batch[:n], dst[:n]); err != nil {
			return err
		}
	}
	return nil
}

func testLayout(ctx context.Context, m *Module) error {
	l, err := m.NewLayout(ctx, LayoutOptions{Seed: 1})
	if err != nil {
		return err
	}
	defer l.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	uneven := kv.Uniform(3, 3, 1, 4096)
	uneven.Planes[1].PageBytes = 9000
	for id, g := range []kv.Geometry{kv.Uniform(16, 4, 2, 16384), uneven} {
		planes := make([]abi.Plane, len(g.Planes))
		for i, p := range g.Planes {
			planes[i] = abi.Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes}
		}
		h := abi.LayoutHeader{Namespace: uint32(id), Blocks: g.Blocks, Planes: uint32(len(planes))}
		if _, err := l.plan(h, planes, testNamespace(id), g); err != nil {
			return err
		}
	}
	return nil
}

func testPlace(ctx context.Context, m *Module) error {
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
		if err := p.Namespace(uint32(id), testNamespace(id)); err != nil {
			return err
		}
	}
	seen := map[string]abi.PlaceQuery{}
	for n := range uint32(16) { // each field of a query in two values
		q := abi.PlaceQuery{Namespace: n & 1, Group: n >> 1 & 1, Rank: n >> 2 & 1, Size: testSize, KeyLen: abi.KeyBytes}
		for i := range q.Key {
			q.Key[i] = byte(0xa7 * (uint32(i) + 1) >> (n >> 3 & 1))
		}
		path, _, err := p.Path(&q, nil)
		if err != nil {
			return err
		}
		if len(path) == 0 {
			continue // the policy leaves the name to the host
		}
		if other, twice := seen[string(path)]; twice {
			return fmt.Errorf("%s gave %q twice: for %s and %s", abi.ExportPlace, path, query(&other), query(&q))
		}
		seen[string(path)] = q
	}
	return nil
}

func query(q *abi.PlaceQuery) string {
	return fmt.Sprintf("namespace %d, group %d, rank %d, key %x", q.Namespace, q.Group, q.Rank, q.Key[:q.KeyLen])
}

// testNamespace returns a namespace's text in the form of a host.
func testNamespace(id int) string {
	n := kv.Namespace{
		Model: fmt.Sprintf("self-test/model-%d", id), Revision: "1", DType: "bfloat16", Engine: "kvhost",
		Groups: []kv.Group{{Geometry: kv.Uniform(16, 4, 2, 16384)}, {ID: 1, Geometry: kv.Uniform(3, 3, 1, 4096)}},
	}
	return n.Text()
}
