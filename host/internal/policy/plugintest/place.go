package plugintest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// placer passes queries to one instance of a place policy.
type placer struct {
	c      *checker
	p      *policy.Probe
	longer uint32
	facts  []abi.RootFacts
}

const (
	mostPath  = 1024
	placeRoom = abi.PlaceAnswerSize + mostPath
)

func (c placeChecks) placer(longer uint32) (*placer, error) {
	p, err := c.ready(longer, map[int]uint32{
		abi.BufferArgs: abi.PlaceQuerySize + longer, abi.BufferResult: placeRoom,
		abi.BufferRoots: abi.RootsHeaderSize + 64*(abi.RootFactsSize+longer),
	})
	if err != nil {
		return nil, err
	}
	pl := &placer{c: c.checker, p: p, longer: longer}
	if err := pl.roots(nil); err != nil {
		p.Close()
		return nil, err
	}
	return pl, nil
}

// roots passes the facts, if the guest has a buffer for them.
func (l *placer) roots(facts []abi.RootFacts) error {
	l.facts = facts
	stride := abi.RootFactsSize + l.longer
	if ok, err := l.p.Buffer(abi.BufferRoots, abi.RootsHeaderSize+64*stride); !ok || err != nil {
		return err // the buffer is optional
	}
	b, err := l.p.Bytes(abi.BufferRoots, abi.RootsHeaderSize+uint32(len(facts))*stride)
	if err != nil {
		return l.c.fault(abi.ExportBuffer, "ROOTS", err)
	}
	*(*abi.RootsHeader)(unsafe.Pointer(&b[0])) = abi.RootsHeader{Count: uint32(len(facts)), Stride: stride}
	for i := range facts {
		*(*abi.RootFacts)(unsafe.Pointer(&b[abi.RootsHeaderSize+uint32(i)*stride])) = facts[i]
	}
	return nil
}

// path asks for a path. ok is false when the guest leaves it to the host.
func (l *placer) path(q abi.PlaceQuery) (path []byte, root uint32, ok bool, err error) {
	stride := abi.PlaceQuerySize + l.longer
	b, err := l.p.Bytes(abi.BufferArgs, stride)
	if err != nil {
		return nil, 0, false, l.c.fault(abi.ExportPlace, "ARGS", err)
	}
	*(*abi.PlaceQuery)(unsafe.Pointer(&b[0])) = q
	n, ok, err := l.c.good(l.p, abi.ExportPlace, 1, uint64(stride), 1)
	if err != nil || !ok {
		return nil, 0, false, err
	}
	out, err := l.p.Bytes(abi.BufferResult, placeRoom)
	if err != nil {
		return nil, 0, false, l.c.fault(abi.ExportPlace, "RESULT", err)
	}
	a := *(*abi.PlaceAnswer)(unsafe.Pointer(&out[0]))
	if n != 1 {
		return nil, 0, false, l.c.finding(abi.ExportPlace, fmt.Sprintf("it gives %d answers to 1 query", n),
			"answer each, and n as the count")
	}
	if uint64(a.Off)+uint64(a.Len) > uint64(len(out)) {
		return nil, 0, false, l.c.finding(abi.ExportPlace, fmt.Sprintf("its path of %d bytes at %d lies outside RESULT",
			a.Len, a.Off), "write paths behind the answers; off counts from the start of RESULT")
	}
	path = slices.Clone(out[a.Off : a.Off+a.Len])
	if err := policy.CheckPath(path); err != nil {
		return nil, 0, false, l.c.finding(abi.ExportPlace, strings.TrimPrefix(err.Error(), policy.ErrFault.Error()+": "),
			"1 to 8 components of 1 to 255 bytes of [A-Za-z0-9._=@+-], none with a dot in front")
	}
	if a.Root != abi.None && a.Root >= uint32(len(l.facts)) {
		return nil, 0, false, l.c.finding(abi.ExportPlace, fmt.Sprintf("it chooses root %d of %d", a.Root, len(l.facts)),
			"choose an index into ROOTS, or 0xffffffff")
	}
	return path, a.Root, true, nil
}

// queries returns pieces to name: namespaces by text, every length of key, the smallest and largest groups and ranks.
func (c placeChecks) queries() []abi.PlaceQuery {
	rng := rand.New(rand.NewPCG(c.o.Seed, 41))
	var out []abi.PlaceQuery
	add := func(q abi.PlaceQuery) {
		for i := range q.Key[:q.KeyLen] {
			q.Key[i] = byte(rng.Uint32())
		}
		out = append(out, q)
	}
	for i := range texts {
		for _, group := range []uint32{0, 1, 10, 0xffffffff} {
			for _, rank := range []uint32{0, 1, 11, 0xffffffff} {
				add(abi.PlaceQuery{Namespace: uint32(i), Group: group, Rank: rank, KeyLen: 32, Size: 1 + rng.Uint32N(4096)})
			}
		}
	}
	for n := uint32(4); n <= abi.KeyBytes; n++ {
		add(abi.PlaceQuery{Namespace: 1, KeyLen: n, Size: 1})
	}
	twin := out[len(out)-1]
	for _, change := range []func(*abi.PlaceQuery){ // the same key, with every other field changed
		func(q *abi.PlaceQuery) { q.Namespace = 2 }, func(q *abi.PlaceQuery) { q.Group = 1 }, func(q *abi.PlaceQuery) { q.Rank = 1 },
		func(q *abi.PlaceQuery) { q.Group, q.Rank = 11, 1 }, func(q *abi.PlaceQuery) { q.Group, q.Rank = 1, 11 },
		func(q *abi.PlaceQuery) { q.Key[0] ^= 1 }, func(q *abi.PlaceQuery) { q.Key[31] ^= 0x80 },
		func(q *abi.PlaceQuery) { q.KeyLen = 31; q.Key[31] = 0 },
	} {
		q := twin
		change(&q)
		out = append(out, q)
	}
	return out
}

// facts returns sets of roots: two that differ in everything, a closed one, many.
func facts() [][]abi.RootFacts {
	const gib = 1 << 30
	fast := abi.RootFacts{ID: 3, Flags: abi.RootWritable, Capacity: 100 * gib, Free: 50 * gib, ReadBps: 6 * gib,
		WriteBps: 3 * gib}
	full := abi.RootFacts{ID: 3, Flags: abi.RootWritable, Capacity: 100 * gib, ReadBps: 6 * gib, WriteBps: 3 * gib}
	mount := abi.RootFacts{ID: 9, Flags: abi.RootWritable, Capacity: 1 << 50, Free: 1 << 49}
	closed := abi.RootFacts{ID: 4, Capacity: 900 * gib, Free: 800 * gib, ReadBps: 50 * gib, WriteBps: 50 * gib}
	many := make([]abi.RootFacts, 64)
	for i := range many {
		many[i] = fast
		many[i].ID = uint32(i)
	}
	return [][]abi.RootFacts{{fast}, {fast, mount}, {mount, full}, {closed, fast}, {{}}, many,
		{{ID: 1, Flags: abi.RootWritable, Capacity: ^uint64(0), Free: ^uint64(0), ReadBps: ^uint64(0), WriteBps: ^uint64(0)}}}
}

// placeChecks are the checks of a place policy.
type placeChecks struct{ *checker }

func (c placeChecks) place() {
	l, err := c.placer(0)
	if err != nil {
		c.r.add(err)
		return
	}
	defer l.p.Close()
	queries := c.queries()
	names, err := c.distinct(l, queries)
	if err != nil || !names {
		c.r.add(err)
		return
	}
	c.r.add(c.chosen(l, queries))
	if longer, err := c.placer(8); err != nil {
		c.r.add(err)
	} else {
		if _, err = c.distinct(longer, queries); err != nil {
			err = fmt.Errorf("with records 8 bytes longer: step by the stride of the call, and read only what you know: %w", err)
		}
		c.r.add(err)
		longer.p.Close()
	}
	c.r.Memory = max(c.r.Memory, l.p.MemoryBytes())
	if l, err := c.placer(0); err == nil {
		c.r.add(c.strangers(l))
		c.r.add(c.shortRecords(l.p, abi.ExportPlace))
		l.p.Close()
	}
}

// distinct checks that every query gets its own path. names is false if the guest leaves naming to the host.
func (c placeChecks) distinct(l *placer, queries []abi.PlaceQuery) (names bool, err error) {
	whose := map[string]int{}
	for i, q := range queries {
		path, _, ok, err := l.path(q)
		if err != nil || !ok {
			return false, err
		}
		if j, taken := whose[string(path)]; taken {
			return false, c.finding(abi.ExportPlace, fmt.Sprintf("it gives %q to two: %s and %s", path, spell(&queries[j]),
				spell(&q)), "put namespace, group, rank and the whole key into the path: of two pieces the second gets the built-in name")
		}
		whose[string(path)] = i
	}
	return true, nil
}

func spell(q *abi.PlaceQuery) string {
	return fmt.Sprintf("(namespace %d, group %d, rank %d, key %x)", q.Namespace, q.Group, q.Rank,
		q.Key[:min(q.KeyLen, abi.KeyBytes)])
}

// chosen asks again under other facts and sizes: a root that takes no stores must not be chosen.
func (c placeChecks) chosen(l *placer, queries []abi.PlaceQuery) error {
	for round, roots := range facts() {
		if err := l.roots(roots); err != nil {
			return err
		}
		writable := slices.ContainsFunc(roots, func(r abi.RootFacts) bool { return r.Flags&abi.RootWritable != 0 })
		for i, q := range queries {
			q.Size = uint32(1 + i*round*997)
			_, root, _, err := l.path(q)
			if err != nil {
				return err
			}
			if root != abi.None && writable && roots[root].Flags&abi.RootWritable == 0 {
				return c.finding(abi.ExportPlace, fmt.Sprintf("it chooses root %d, which takes no stores, of %d", root, len(roots)),
					"mind bit 0 of the root's flags")
			}
		}
	}
	return l.roots(nil)
}

// strangers asks for namespaces that were never announced. Any status is allowed.
func (c placeChecks) strangers(l *placer) error {
	if err := c.strangeNamespace(l.p); err != nil {
		return err
	}
	for _, q := range []abi.PlaceQuery{{Namespace: namespaces - 2, KeyLen: 32}, {Namespace: 0xffffffff, KeyLen: 32},
		{Namespace: 1}, {Namespace: 1, KeyLen: 0xffffffff}} {
		b, err := l.p.Bytes(abi.BufferArgs, abi.PlaceQuerySize)
		if err != nil {
			return c.fault(abi.ExportPlace, "ARGS", err)
		}
		*(*abi.PlaceQuery)(unsafe.Pointer(&b[0])) = q
		if _, _, err := c.call(l.p, abi.ExportPlace, 1, abi.PlaceQuerySize, 1); err != nil {
			return c.tolerate(err, fmt.Sprintf("given namespace %d, which was not announced, or a key of %d bytes,", q.Namespace,
				q.KeyLen))
		}
	}
	return nil
}
