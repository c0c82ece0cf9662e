package proto

import (
	"strings"
	"testing"

	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestJSON(t *testing.T) {
	for _, c := range []struct {
		m    protobuf.Message
		want string // a part
	}{
		{&Trial{Keys: 1 << 60}, `{"capacity":0,"dropped":0,"hits":0,"keys":1152921504606846976,"live_hits":0,"used":0}`},
		{&StatusResponse{Counters: map[string]uint64{"lookups": 3}}, `"counters":{"lookups":3}`},
		{&StatusResponse{NotReady: []string{`a "b"`}}, `"not_ready":["a \"b\""]`},
		{&StatusResponse{Roots: []*RootStatus{{State: RootState_ROOT_STATE_READ_ONLY}}}, `"state":"read_only"`},
		{&StatusResponse{}, `"roots":[]`},
		{&PolicyStatus{State: PolicyState_POLICY_STATE_ACTING}, `"state":"acting"`},
		{&PolicyStatus{State: 77}, `"state":77`}, // of a newer host
		{&LatencyStatus{Bounds: []*durationpb.Duration{{Nanos: 5e8}}, Buckets: []uint64{1, 2}}, `"bounds":[0.5],"buckets":[1,2]`},
		{&RootStatus{Since: &timestamppb.Timestamp{Seconds: 1e9, Nanos: 25e7}}, `"since":1000000000.25`},
	} {
		got, err := JSON(c.m)
		if err != nil || !strings.Contains(string(got), c.want) {
			t.Errorf("JSON: got %s, %v, want %s", got, err, c.want)
		}
	}
	if got, err := JSON(&PolicyStatus{}); err != nil || strings.Contains(string(got), "trial") {
		t.Errorf("%s, %v: there is no trial", got, err)
	}
}
