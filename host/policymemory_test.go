package host_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// The memory of each policy and of all is in the metrics and in the status, beside what all may have.
func TestPolicyMemoryIsShown(t *testing.T) {
	c := configuration(t)
	c.PolicyDir, c.PolicyMemory = policytest.Dir(t, "lru", "fanout", "sieve"), 1<<30
	c.Policies = []config.Policy{{Module: "lru"}, {Module: "fanout"}, {Module: "sieve", Shadow: true}}
	h, _ := hosttest.Start(t, c)
	st := h.Status()
	var sum uint64
	for _, p := range st.Policies {
		if sum += p.Memory; (p.Memory == 0) != (p.Digest == "") {
			t.Errorf("%s, %s has %d bytes", p.Name, p.Digest, p.Memory)
		}
	}
	if sum == 0 || sum != st.PolicyMemory || st.PolicyMemoryLimit != 1<<30 {
		t.Errorf("%d bytes by policy, %d of %d in all", sum, st.PolicyMemory, st.PolicyMemoryLimit)
	}
	metrics := get(t, h, "/metrics")
	var shown float64
	for line := range strings.Lines(metrics) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "kvhost_policy_memory_bytes{") || strings.HasPrefix(name, "kvhost_shadow_memory_bytes{") {
			var bytes float64
			if _, err := fmt.Sscan(value, &bytes); err != nil {
				t.Fatalf("metric %q: %v", line, err)
			}
			shown += bytes
		}
	}
	if shown != float64(sum) {
		t.Errorf("the metrics show %.0f bytes, the status %d", shown, sum)
	}
	for _, want := range []string{
		fmt.Sprintf("kvhost_policies_memory_bytes %v\n", float64(sum)), "kvhost_policies_memory_limit_bytes 1.073741824e+09\n",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
}
