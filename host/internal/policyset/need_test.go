package policyset

import (
	"log/slog"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

// The memory of full roots follows from their capacity and the policy that evicts there.
func TestNeedsFollowCapacityAndPolicy(t *testing.T) {
	c := config.Default()
	c.PolicyDir, c.PolicyCache, c.PolicyMemory = policytest.Dir(t, "lru", "prefix"), t.TempDir(), 1<<30
	if err := os.Chmod(c.PolicyCache, 0o700); err != nil {
		t.Fatal(err)
	}
	fuel := config.Fuel{Time: time.Minute} // it is their memory that is measured, also on a busy machine
	c.Policies = []config.Policy{{Module: "lru", Fuel: fuel}, {Module: "prefix", Fuel: fuel}}
	c.Roots = []config.Root{{Path: "/a", Capacity: 200 << 40, Evict: "lru"}, {Path: "/b", Capacity: 200 << 40, Evict: "prefix"},
		{Path: "/c", Capacity: 8 << 40, Evict: "prefix"}}
	p, err := Open(t.Context(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(t.Context())
	needs, err := p.Needs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := p.Memory().Limit()
	if all != 1<<30 || len(needs) != 3 {
		t.Fatalf("%d bytes for all, %d roots", all, len(needs))
	}
	lru, prefix, small := needs[0], needs[1], needs[2]
	if lru.Entries != 200<<20 || prefix.Entries != 200<<20 || small.Entries != 8<<20 {
		t.Errorf("entries: %d, %d, %d", lru.Entries, prefix.Entries, small.Entries)
	}
	if lru.PolicyBytes < 200<<20*16 || lru.PolicyBytes > 200<<20*22 || lru.PolicyFits < lru.Entries {
		t.Errorf("lru: %+v", lru)
	}
	if prefix.PolicyBytes < 200<<20*80 || prefix.PolicyFits >= prefix.Entries || small.PolicyFits != small.Entries {
		t.Errorf("prefix: %+v, %+v", prefix, small)
	}
}

// A set that is closed while its policies are measured waits for that: their code and memory are unmapped then.
func TestCloseWaitsForTheMeasurement(t *testing.T) {
	c := config.Default()
	c.PolicyDir, c.PolicyCache = policytest.Dir(t, "lru"), t.TempDir()
	if err := os.Chmod(c.PolicyCache, 0o700); err != nil {
		t.Fatal(err)
	}
	c.Policies = []config.Policy{{Module: "lru"}}
	c.Roots = []config.Root{{Path: "/a", Capacity: 1 << 30}}
	p, err := Open(t.Context(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	idle := p.memory.Used()
	var closed atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !closed.Load() { // the loop below may see nothing of a short measurement
			p.LogNeeds(t.Context())
		}
	}()
	for p.memory.Used() == idle {
		runtime.Gosched()
	}
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	closed.Store(true)
	<-ended
	p.LogNeeds(t.Context()) // does nothing any more
}
