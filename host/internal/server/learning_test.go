package server

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// learns is all that a tenant hears while it looks, stores, looks again and discards, after others have stored some of its keys.
func learns(t *testing.T, tenant uint32, private bool, others bool) (heard, files []string) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Rules = socket.Rules{{First: 7, Last: 8, Private: private}} })
	dial := func(n uint32) *peer {
		return r.dial(func(h *client.Hello) { h.Tenant, h.Engine = n, fmt.Sprint("engine ", n) })
	}
	if others {
		dial(1).save(0, 3)
		dial(8).save(4, 5)
	}
	p := dial(tenant)
	say := func(format string, args ...any) { heard = append(heard, fmt.Sprintf(format, args...)) }
	look := func() int {
		l := p.look(6)
		testenv.OK(t, l.Release(t.Context()))
		return l.Hits()
	}
	say("%d hits", look())
	var list []client.StoreChunk
	for n := range 6 {
		p.fill(n, n)
		list = append(list, chunkOf(n, n))
	}
	res, err := p.store(list)
	testenv.OK(t, err)
	for _, c := range res.Chunks {
		say("%v, %v", c.Result, c.Err)
	}
	say("%d bytes, %d hits", res.Bytes, look())
	p.check(6)
	answers, err := p.Discard(t.Context(), 0, []kv.Key{key(0), key(4), key(9)})
	testenv.OK(t, err)
	say("%v, %d hits", answers, look())
	root := filepath.Join(r.dir, "root")
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".kv") {
			files = append(files, strings.TrimPrefix(path, root))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return heard, files
}

// Whatever others stored, a private tenant hears the same, and its files have the same names. Without that setting a tenant would
// learn of others by hits, by what STORE says, and by what DISCARD says.
func TestPrivateTenantsLearnNothing(t *testing.T) {
	alone, files := learns(t, 7, true, false)
	among, all := learns(t, 7, true, true)
	if !slices.Equal(alone, among) {
		t.Errorf("alone:\n%s\namong others:\n%s", strings.Join(alone, "\n"), strings.Join(among, "\n"))
	}
	if len(files) != 4 || slices.ContainsFunc(files, func(name string) bool { return !slices.Contains(all, name) }) {
		t.Errorf("alone its files are %q, among others' %q", files, all)
	}
	alone, _ = learns(t, 7, false, false)
	among, _ = learns(t, 7, false, true)
	for i, what := range map[int]string{0: "a lookup", 1: "a store", len(alone) - 1: "a discard"} {
		if alone[i] == among[i] {
			t.Errorf("the control learns nothing by %s: %s", what, alone[i])
		}
	}
}

// Where the quotas of all tenants together fit the roots, a tenant that stores and looks again learns nothing of what others
// store: all of its entries stay. Without them it does.
func TestQuotasThatFitTellNothing(t *testing.T) {
	const capacity = 40 * (chunkBytes + 2*pageBytes)
	for _, quotas := range []bool{true, false} {
		r := newRig(t, func(_ *Config, s *store.Config) {
			s.Roots[0].Capacity = capacity
			if quotas {
				s.Quotas = []store.Quota{{First: 1, Last: 2, Share: 0.4}}
			}
		})
		quiet := r.dial(func(h *client.Hello) { h.Tenant, h.Engine = 1, "quiet" })
		quiet.save(0, 12)
		busy := r.dial(func(h *client.Hello) { h.Tenant, h.Engine = 2, "busy" })
		stored := 0
		for n := range 200 {
			res, err := busy.store([]client.StoreChunk{{Key: key(1000 + n), Blocks: blocks(n % 16)}})
			testenv.OK(t, err)
			if res.Chunks[0].Result == client.Stored {
				stored++
			}
		}
		if stored < 100 {
			t.Errorf("quotas %t: the busy tenant stored %d of 200", quotas, stored)
		}
		if hits := quiet.look(12).Hits(); (hits == 12) != quotas {
			t.Errorf("quotas %t: of 12 entries the quiet tenant finds %d", quotas, hits)
		}
	}
}
