package plugintest

import (
	"bytes"
	"fmt"
	"math/rand/v2"

	"github.com/kvhost/kvhost/abi"
)

// manyKeys is more than a policy can keep in a small table: one that remembers what it was asked shows it.
const manyKeys = 20_000

// many asks for the paths of many keys, and again in another order, of this instance and of a new one.
func (c placeChecks) many(l *placer) error {
	rng := rand.New(rand.NewPCG(c.o.Seed, 47))
	queries := make([]abi.PlaceQuery, manyKeys)
	for i := range queries {
		q := &queries[i]
		*q = abi.PlaceQuery{Namespace: rng.Uint32N(uint32(len(texts))), Group: rng.Uint32N(4), Rank: rng.Uint32N(8), KeyLen: 32, Size: 1 + rng.Uint32N(4096)}
		for k := range q.Key {
			q.Key[k] = byte(rng.Uint32())
		}
	}
	paths, err := c.distinct(l, queries)
	if err != nil || paths == nil {
		return err
	}
	other, err := c.placer(0, identity, texts)
	if err != nil {
		return err
	}
	defer other.p.Close()
	for _, i := range rng.Perm(len(queries)) {
		for _, again := range []struct {
			l   *placer
			how string
		}{{l, "asked again"}, {other, "another instance"}} {
			path, _, ok, err := again.l.path(queries[i])
			if err != nil {
				return err
			}
			if !ok || !bytes.Equal(path, paths[i]) {
				return c.finding(abi.ExportPlace, fmt.Sprintf("with many keys, %s, it gives %q in place of %q to %s", again.how, path,
					paths[i], spell(&queries[i])), "a path must follow from namespace text, group, rank and key, not from earlier calls")
			}
		}
	}
	return nil
}
