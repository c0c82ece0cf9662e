package plugintest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
)

// placer passes queries to one instance of a place policy.
type placer struct {
	c      *checker
	p      *policy.Probe
	longer uint32
	id     func(int) uint32
	facts  []abi.RootFacts
}

const (
	mostPath  = 1024
	placeRoom = abi.PlaceAnswerSize + mostPath
)

func (c placeChecks) placer(longer uint32, id func(int) uint32, order []string) (*placer, error) {
	p, err := c.probe(0, longer)
	if err != nil {
		return nil, err
	}
	err = c.room(p, map[int]uint32{
		abi.BufferArgs: max(abi.PlaceQuerySize+longer, abi.PathRefSize+longer+mostPath), abi.BufferResult: placeRoom,
		abi.BufferRoots: abi.RootsHeaderSize + 64*(abi.RootFactsSize+longer),
	})
	pl := &placer{c: c.checker, p: p, longer: longer, id: id}
	if err == nil {
		err = pl.roots(nil)
	}
	if err == nil {
		err = c.announce(p, order, id)
	}
	if err != nil {
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
		return err // it may do without
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

// read asks for the inverse of a path.
func (l *placer) read(path []byte) (id abi.PathIdentity, ok bool, err error) {
	stride := abi.PathRefSize + l.longer
	b, err := l.p.Bytes(abi.BufferArgs, stride+uint32(len(path)))
	if err != nil {
		return id, false, l.c.fault(abi.ExportUnplace, "ARGS", err)
	}
	*(*abi.PathRef)(unsafe.Pointer(&b[0])) = abi.PathRef{Off: stride, Len: uint32(len(path))}
	copy(b[stride:], path)
	n, ok, err := l.c.good(l.p, abi.ExportUnplace, 1, uint64(stride), 1)
	if err != nil || !ok {
		return id, false, err
	}
	if n != 1 {
		return id, false, l.c.finding(abi.ExportUnplace, fmt.Sprintf("it gives %d answers to 1 path", n),
			"answer each, and n as the count")
	}
	out, err := l.p.Bytes(abi.BufferResult, abi.PathIdentitySize)
	if err != nil {
		return id, false, l.c.fault(abi.ExportUnplace, "RESULT", err)
	}
	return *(*abi.PathIdentity)(unsafe.Pointer(&out[0])), true, nil
}

// queries are identities to name: namespaces by text, every length of key, the smallest and largest groups and ranks.
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
	for _, change := range []func(*abi.PlaceQuery){ // the same key, in all else different
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

// facts are sets of roots: two that differ in everything, one that is closed, many.
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

// placeChecks are what a place policy must pass.
type placeChecks struct{ *checker }

// place checks a place policy.
func (c placeChecks) place() {
	l, err := c.placer(0, identity, texts)
	if err != nil {
		c.r.add(err)
		return
	}
	defer l.p.Close()
	queries := c.queries()
	paths, err := c.distinct(l, queries)
	if err != nil || paths == nil {
		c.r.add(err)
		return
	}
	c.r.add(c.inverse(l, queries, paths))
	c.r.add(c.pure(l, queries, paths))
	c.r.add(c.many(l))
	reversed := slices.Clone(texts)
	slices.Reverse(reversed)
	for _, o := range []struct {
		longer  uint32
		id      func(int) uint32
		order   []string
		back    func(int) int
		how, do string
	}{
		{0, identity, texts, func(i int) int { return i }, "another instance",
			"a path must follow from namespace text, group, rank and key"},
		{0, turned, reversed, func(i int) int { return len(texts) - 1 - i },
			"with other ids for the namespaces, announced in another order,", "a path must follow from the namespace's text, " +
				"not its id"},
		{8, identity, texts, func(i int) int { return i }, "with records 8 bytes longer",
			"step by the stride of the call, and read only what you know"},
	} {
		c.r.add(c.same(o.longer, o.id, o.order, o.back, queries, paths, o.how, o.do))
	}
	c.r.Memory = max(c.r.Memory, l.p.MemoryBytes())
	for _, export := range []string{abi.ExportPlace, abi.ExportUnplace} {
		if l, err := c.placer(0, identity, texts); err == nil {
			c.r.add(c.strangers(l, export))
			c.r.add(c.shortRecords(l.p, export))
			l.p.Close()
		}
	}
}

// distinct checks that every query gets its own path. paths is nil when the guest leaves naming to the host.
func (c placeChecks) distinct(l *placer, queries []abi.PlaceQuery) (paths [][]byte, err error) {
	whose := map[string]int{}
	for i, q := range queries {
		path, _, ok, err := l.path(q)
		if err != nil || !ok {
			return nil, err
		}
		if j, taken := whose[string(path)]; taken {
			return nil, c.finding(abi.ExportPlace, fmt.Sprintf("it gives %q to two: %s and %s", path, spell(&queries[j]),
				spell(&q)), "put namespace, group, rank and the whole key into the path")
		}
		whose[string(path)] = i
		paths = append(paths, path)
	}
	return paths, nil
}

func spell(q *abi.PlaceQuery) string {
	return fmt.Sprintf("(namespace %d, group %d, rank %d, key %x)", q.Namespace, q.Group, q.Rank,
		q.Key[:min(q.KeyLen, abi.KeyBytes)])
}

// inverse reads the paths back, and others that are almost the same.
func (c placeChecks) inverse(l *placer, queries []abi.PlaceQuery, paths [][]byte) error {
	rng := rand.New(rand.NewPCG(c.o.Seed, 43))
	for i, path := range paths {
		id, ok, err := l.read(path)
		if err != nil {
			return err
		}
		q := &queries[i]
		want := abi.PathIdentity{Known: 1, Namespace: q.Namespace, Group: q.Group, Rank: q.Rank, KeyLen: q.KeyLen, Key: q.Key}
		if !ok || id != want {
			return c.finding(abi.ExportUnplace, fmt.Sprintf("it reads %q, which kv_place gave to %s, as known %d, namespace "+
				"%d, group %d, rank %d, key %x", path, spell(q), id.Known, id.Namespace, id.Group, id.Rank, id.Key[:min(id.KeyLen,
				abi.KeyBytes)]),
				"it must be the inverse of kv_place: a host finds its files by it after a restart")
		}
		for _, other := range nearly(rng, path) {
			if err := c.foreign(l, other); err != nil {
				return err
			}
		}
	}
	for _, odd := range []string{"x", "lost+found", "a/b/c", strings.Repeat("a/", 7) + "b", strings.Repeat("z", 255),
		"=/=/=", "0/0/0/0"} {
		if err := c.foreign(l, []byte(odd)); err != nil {
			return err
		}
	}
	return nil
}

// nearly are paths that differ little from a good one.
func nearly(rng *rand.Rand, path []byte) [][]byte {
	at := rng.IntN(len(path))
	changed := slices.Clone(path)
	changed[at] = "0123456789abcdefABCDEFgr._-=/"[rng.IntN(29)]
	return [][]byte{changed, path[:at], slices.Concat(path, []byte("0")), slices.Concat(path[:at], []byte("0"), path[at:]),
		slices.Concat([]byte("0"), path), bytes.ToUpper(path)}
}

// foreign checks a path of unknown origin: if the guest reads it as an identity, it must return it for that identity.
func (c placeChecks) foreign(l *placer, path []byte) error {
	if policy.CheckPath(path) != nil {
		return nil
	}
	id, ok, err := l.read(path)
	if err != nil || !ok || id.Known == 0 {
		return err
	}
	do := "known is 1 only when kv_place would give exactly this path"
	if id.Known > 1 || id.KeyLen == 0 || id.KeyLen > abi.KeyBytes || id.Namespace >= namespaces {
		return c.finding(abi.ExportUnplace, fmt.Sprintf("it reads %q as known %d, namespace %d, key of %d bytes", path,
			id.Known, id.Namespace, id.KeyLen), do)
	}
	again, _, ok, err := l.path(abi.PlaceQuery{Namespace: id.Namespace, Group: id.Group, Rank: id.Rank, KeyLen: id.KeyLen,
		Key: id.Key})
	if err == nil && ok && !bytes.Equal(again, path) {
		err = c.finding(abi.ExportUnplace, fmt.Sprintf("it takes %q for its own, and gives %q to what it reads there", path,
			again), do)
	}
	return err
}

// pure asks again under other facts and sizes: only the root may change.
func (c placeChecks) pure(l *placer, queries []abi.PlaceQuery, paths [][]byte) error {
	for round, roots := range facts() {
		if err := l.roots(roots); err != nil {
			return err
		}
		writable := slices.ContainsFunc(roots, func(r abi.RootFacts) bool { return r.Flags&abi.RootWritable != 0 })
		for i, q := range queries {
			q.Size = uint32(1 + i*round*997)
			path, root, ok, err := l.path(q)
			if err != nil {
				return err
			}
			if !ok || !bytes.Equal(path, paths[i]) {
				return c.finding(abi.ExportPlace, fmt.Sprintf("asked again with other roots and another size, it gives %q to %s, "+
					"before %q", path, spell(&q), paths[i]), "only the root may depend on live facts")
			}
			if root != abi.None && writable && roots[root].Flags&abi.RootWritable == 0 {
				return c.finding(abi.ExportPlace, fmt.Sprintf("it chooses root %d, which takes no stores, of %d", root, len(roots)),
					"mind bit 0 of the root's flags")
			}
		}
	}
	return l.roots(nil)
}

// same checks that another instance returns the same paths.
func (c placeChecks) same(longer uint32, id func(int) uint32, order []string, back func(int) int,
	queries []abi.PlaceQuery, paths [][]byte, how, do string) error {
	l, err := c.placer(longer, id, order)
	if err != nil {
		return err
	}
	defer l.p.Close()
	if err := l.roots(facts()[1]); err != nil {
		return err
	}
	for i := range queries {
		i = len(queries) - 1 - i
		q := queries[i]
		q.Namespace = id(back(int(q.Namespace)))
		path, _, ok, err := l.path(q)
		if err != nil {
			return err
		}
		if !ok || !bytes.Equal(path, paths[i]) {
			return c.finding(abi.ExportPlace, fmt.Sprintf("%s it gives %q to %s, the first one %q", how, path,
				spell(&queries[i]), paths[i]), do)
		}
	}
	return nil
}

// strangers asks for namespaces that were never announced. Any status is allowed.
func (c placeChecks) strangers(l *placer, export string) error {
	if err := c.strangeNamespace(l.p); err != nil {
		return err
	}
	if export == abi.ExportUnplace {
		return nil
	}
	for _, q := range []abi.PlaceQuery{{Namespace: namespaces - 2, KeyLen: 32}, {Namespace: 0xffffffff, KeyLen: 32},
		{Namespace: 1}, {Namespace: 1, KeyLen: 0xffffffff}} {
		b, err := l.p.Bytes(abi.BufferArgs, abi.PlaceQuerySize)
		if err != nil {
			return c.fault(abi.ExportPlace, "ARGS", err)
		}
		*(*abi.PlaceQuery)(unsafe.Pointer(&b[0])) = q
		if _, _, err := c.call(l.p, export, 1, abi.PlaceQuerySize, 1); err != nil {
			return c.tolerate(err, fmt.Sprintf("given namespace %d, which was not announced, or a key of %d bytes,", q.Namespace,
				q.KeyLen))
		}
	}
	return nil
}
