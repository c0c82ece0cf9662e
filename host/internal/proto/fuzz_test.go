package proto

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// FuzzDescriptor reads what comes with a descriptor, and writes it again.
func FuzzDescriptor(f *testing.F) {
	f.Add(AppendDescriptor(nil, bytes.Repeat([]byte{7}, NonceBytes), 1<<60))
	f.Fuzz(func(t *testing.T, b []byte) {
		nonce, tag, err := ParseDescriptor(b)
		if (err == nil) != (len(b) == DescriptorBytes) {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if err == nil && !bytes.Equal(AppendDescriptor(nil, nonce[:], tag), b) {
			t.Fatalf("%x reads back as another", b)
		}
	})
}

// FuzzKeys unpacks keys of every length, and packs them again.
func FuzzKeys(f *testing.F) {
	f.Add([]byte("0123456789abcdef0123456789abcdef"), 16)
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00"), 8)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n < 8 || n > kv.KeyBytes { // HELLO has refused it
			return
		}
		keys, err := ParseKeys(nil, b, n)
		if err == nil && !bytes.Equal(PackKeys(keys, n), b) {
			t.Fatalf("%d keys read back as others", len(keys))
		}
		for _, k := range keys {
			if err == nil && k == kv.Root {
				t.Fatal("the key that is none")
			}
		}
		if one, oneErr := ParseKey(b, n); len(b) == n && (oneErr == nil) != (err == nil) || oneErr == nil && !bytes.Equal(one[:n], b) {
			t.Fatalf("one key: %v, a list of one: %v", oneErr, err)
		}
	})
}

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
