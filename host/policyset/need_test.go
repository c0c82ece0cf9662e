package policyset

import (
	"os"
	"testing"

	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy/policytest"
)

// The memory of full roots follows from their capacity and the policy that evicts there.
func TestNeedsFollowCapacityAndPolicy(t *testing.T) {
	c := config.Default()
	c.PolicyDir, c.PolicyCache, c.PolicyMemory = policytest.Dir(t, "lru", "prefix"), t.TempDir(), 1<<30
	if err := os.Chmod(c.PolicyCache, 0o700); err != nil {
		t.Fatal(err)
	}
	c.Policies = []config.Policy{{Module: "lru"}, {Module: "prefix"}}
	c.Roots = []config.Root{{Path: "/a", Capacity: 200 << 40, Evict: "lru"}, {Path: "/b", Capacity: 200 << 40, Evict: "prefix"},
		{Path: "/c", Capacity: 8 << 40, Evict: "prefix"}}
	needs, all, err := Needs(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
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
