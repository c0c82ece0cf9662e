package replay

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// A policy that was swapped during a replay does not give negative counts.
func TestPolicyCountsAfterASwap(t *testing.T) {
	status := func(policies ...*proto.PolicyStatus) *proto.StatusResponse {
		return &proto.StatusResponse{Policies: policies}
	}
	of := func(module string, calls uint64, seconds float64) *proto.PolicyStatus {
		return &proto.PolicyStatus{Role: proto.PolicyRole_POLICY_ROLE_EVICT, Module: module, Calls: calls, Records: 2 * calls,
			Time: durationpb.New(time.Duration(seconds * 1e9))}
	}
	var r Report
	r.addPolicies(status(of("lru", 100, 3), of("fifo", 50, 1), of("sieve", 7, 1), of("sieve", 3, 1)),
		status(of("fifo", 20, 0.5), of("prefix", 30, 2), of("sieve", 17, 1.5), of("sieve", 3, 1)))
	want := []PolicyReport{
		{Role: "evict", Module: "fifo", Calls: 20, Records: 40, Seconds: 0.5},  // restarted
		{Role: "evict", Module: "prefix", Calls: 30, Records: 60, Seconds: 2},  // new
		{Role: "evict", Module: "sieve", Calls: 10, Records: 20, Seconds: 0.5}, // two roots
	}
	if len(r.Policies) != len(want) {
		t.Fatalf("the report has the policies %+v, want %d", r.Policies, len(want))
	}
	for i, w := range want {
		if got := r.Policies[i]; got != w {
			t.Errorf("policy %d of the report is %+v, want %+v", i, got, w)
		}
	}
}
