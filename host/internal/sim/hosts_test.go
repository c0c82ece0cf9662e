package sim

import (
	"bytes"
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// hostsGrid has so many hosts with one policy, the host's own admission, and requests dealt at random.
func hostsGrid(t testing.TB, w *Workload, hosts int, pol string, capacities ...string) *HostsGrid {
	t.Helper()
	g := &HostsGrid{Grid: Grid{Workloads: []*Workload{w}, Policies: []*Policy{evicts(t, pol)}, ChunkBytes: 4096,
		Options: Options{Prefill: DefaultPrefill(), Seed: 1}}, Hosts: hosts, Admissions: []*Policy{admits(t, AdmitDefault)}}
	for _, text := range append([]string{}, capacities...) {
		c, err := ParseCapacity(text)
		testenv.OK(t, err)
		g.Capacities = append(g.Capacities, c)
	}
	g.Deals = []Deal{deal(t, "random")}
	return g
}

func deal(t testing.TB, text string) Deal {
	t.Helper()
	d, err := ParseDeal(text)
	testenv.OK(t, err)
	return d
}

func hostsOutcome(t testing.TB, g *HostsGrid) *HostsOutcome {
	t.Helper()
	o, err := g.Run(context.Background())
	testenv.OK(t, err)
	return o
}

// TestHostsAreOneCache: eight hosts have nearly the hits of one with the capacity of all, and keep a chunk once. Where each copies what it is
// lent they have less room for other chunks, so less hits.
func TestHostsAreOneCache(t *testing.T) {
	g := hostsGrid(t, generated(t, 2000), 8, "lru", "30%", "40%")
	g.Deals = append(g.Deals, deal(t, "sticky"))
	g.Admissions = append(g.Admissions, admits(t, AdmitAll))
	o := hostsOutcome(t, g)
	for at := 0; at < len(o.Results); at += g.rows() {
		for d := range g.Deals {
			rule, all := o.Results[at+d], o.Results[at+len(g.Deals)+d]
			if rule.BesideOneHost < 0.97 || rule.Copies > 1.05 || rule.RemoteHits == 0 {
				t.Errorf("%+v, want 0.97 of the hits of one host, chunks kept once, and remote hits", rule)
			}
			if all.PrefixHits >= rule.PrefixHits || all.Copies <= rule.Copies || all.RemoteHits >= rule.RemoteHits {
				t.Errorf("where all that is lent is copied: %+v, want more copies and fewer hits than %+v", all, rule)
			}
		}
	}
}

// unevenHosts deals to the first host alone, as long prompts may come to one.
func unevenHosts(t *testing.T, w *Workload, admit string) (*HostsResult, *cluster) {
	g := hostsGrid(t, w, 4, "lru", "20%")
	r := &HostsResult{}
	c := &cluster{w: w, result: r, chance: rand.New(rand.NewPCG(1, 1)), has: make([]uint64, len(w.keys)), at: map[uint32]int{}, chunkBytes: 1}
	for _, id := range w.ids {
		c.at[id] = 0
	}
	t.Cleanup(c.close)
	testenv.OK(t, c.open(t.Context(), g, g.Policies[0], admits(t, admit), w.Unique()/20))
	return r, c
}

// TestHostsAddUp: after each request the hosts have what is counted, and what one evicts while others have
// room goes there.
func TestHostsAddUp(t *testing.T) {
	w := generated(t, 400)
	for _, admit := range []string{AdmitDefault, AdmitAll} {
		r, c := unevenHosts(t, w, admit)
		lo := 0
		for i, end := range w.ends {
			n, err := c.request(w.ids[lo:end], uint32(i)+1)
			testenv.OK(t, err)
			r.PrefixHits += n
			lo = int(end)
			held, different := 0, 0
			for id, has := range c.has {
				for _, h := range c.hosts {
					if there := h.slotOf[id] != abi.None; there != (has&(1<<h.number) != 0) {
						t.Fatalf("request %d: host %d has chunk %d: %v, the hosts' bits are %b", i, h.number, id, there, has)
					}
				}
				held += bits.OnesCount64(has)
				if has != 0 {
					different++
				}
			}
			if held != c.held || different != c.different {
				t.Fatalf("request %d: %d chunks, %d different, want %d and %d", i, c.held, c.different, held, different)
			}
		}
		if r.Demotions < w.Unique()/20 || r.RemoteHits == 0 || c.hosts[0].sent == 0 {
			t.Errorf("%+v, want the other hosts filled by demotions, and hits of them", r)
		}
	}
}

// Modules decide as their native twins do, of hosts too.
func TestHostsInWasmAsNative(t *testing.T) {
	dir := policytest.Dir(t, "lru", "reuse")
	g := hostsGrid(t, generated(t, 300), 4, "lru", "10%")
	g.Admissions = append(g.Admissions, reuseAdmits(nil))
	want := hostsOutcome(t, g).Results
	reuse, err := OpenAdmission(t.Context(), "reuse", policy.Options{Dir: dir, Cache: policytest.Cache(t)}, abi.RoleAdmit)
	testenv.OK(t, err)
	defer reuse.Close(context.Background())
	lru, err := OpenPolicy(t.Context(), "lru", policy.Options{Dir: dir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 1 << 30, Record: 1 << 20}}, abi.RoleEvict)
	testenv.OK(t, err)
	defer lru.Close(context.Background())
	g.Policies[0], g.Admissions[1] = lru, reuse
	for i, got := range hostsOutcome(t, g).Results {
		if !reflect.DeepEqual(got, want[i]) || got.Demotions == 0 {
			t.Errorf("%+v\nnatively %+v", got, want[i])
		}
	}
	if a, b := want[0], want[1]; a.PrefixHits != b.PrefixHits || a.Demotions != b.Demotions {
		t.Errorf("reuse: %+v, the host's rule: %+v, want the same where hosts have one level", b, a)
	}
}

func TestGoldenHostsTable(t *testing.T) {
	g := hostsGrid(t, generated(t, 400), 8, "lru", "20%", "40%")
	g.ChunkBytes = 64 << 20
	g.Policies = append(g.Policies, evicts(t, "s3fifo"))
	g.Admissions = append(g.Admissions, admits(t, AdmitAll))
	g.Deals = append(g.Deals, deal(t, "sticky:20%"))
	var table bytes.Buffer
	testenv.OK(t, hostsOutcome(t, g).WriteTable(&table))
	golden(t, "testdata/hosts.txt", table.Bytes())
}

func TestParseDeal(t *testing.T) {
	for text, want := range map[string]float64{"random": 1, "sticky": 0.1, "sticky:0%": 0, "sticky:12.5%": 0.125, "sticky:100%": 1} {
		if d := deal(t, text); d.moves != want || d.String() != text {
			t.Errorf("%s parses as %+v, want %g of the requests to move", text, d, want)
		}
	}
	for _, text := range []string{"", "Random", "random:5%", "sticky:", "sticky:5", "sticky:-1%", "sticky:101%", "sticky:NaN%", "sticky:%"} {
		if d, err := ParseDeal(text); !errors.Is(err, ErrHosts) {
			t.Errorf("%q parses as %+v, %v, want %v", text, d, err, ErrHosts)
		}
	}
	w := generated(t, 50)
	for _, hosts := range []int{-1, 1, mostHosts + 1} {
		if _, err := hostsGrid(t, w, hosts, "lru", "10%").Run(t.Context()); !errors.Is(err, ErrHosts) {
			t.Errorf("%d hosts: %v, want %v", hosts, err, ErrHosts)
		}
	}
	if _, err := hostsGrid(t, w, 8, "lru", "7").Run(t.Context()); !errors.Is(err, ErrCapacity) {
		t.Errorf("7 chunks for 8 hosts: %v, want %v", err, ErrCapacity)
	}
	if _, err := hostsGrid(t, w, 8, Belady, "10%").Run(t.Context()); !errors.Is(err, ErrPolicy) {
		t.Errorf("hosts that know the future: %v, want %v", err, ErrPolicy)
	}
}
