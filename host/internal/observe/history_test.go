package observe

import (
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// The host keeps the last five minutes of what the page draws over time, and no more.
func TestHistoryIsTheLastFiveMinutesOfWhatIsDrawn(t *testing.T) {
	h := &history{}
	for n := range uint64(samplesKept + 7) {
		s := status(n)
		s.Uptime = durationpb.New(time.Duration(n) * sampleEvery)
		s.Routes = append(s.Routes, s.Routes[0], &proto.RouteStatus{Direction: proto.Direction_DIRECTION_STORE, Bytes: 5})
		h.add(s)
	}
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, nil)
	var got []struct {
		Uptime   float64
		Version  string
		Counters map[string]uint64
		Routes   []struct {
			Direction string
			Bytes     uint64
		}
		Policies []struct {
			Name  string
			Trial struct{ Hits uint64 }
		}
		Latencies []struct{ Buckets []uint64 }
	}
	testenv.OK(t, json.Unmarshal(answer.Body.Bytes(), &got))
	if len(got) != samplesKept || got[0].Uptime != 7*sampleEvery.Seconds() {
		t.Fatalf("got %d readings from %v s on, want %d from 14 s on", len(got), got[0].Uptime, samplesKept)
	}
	last, n := got[samplesKept-1], uint64(samplesKept+6)
	if last.Version != "" || len(last.Counters) != 3 || last.Counters["lookup_hits"] != 75*n {
		t.Errorf("the last reading is %+v, want three counters and no version", last)
	}
	if len(last.Routes) != 2 || last.Routes[0].Bytes != 2*n<<30 || last.Routes[1].Bytes != 5 || last.Routes[1].Direction != "store" {
		t.Errorf("routes of the last reading: %+v, want one sum for each direction", last.Routes)
	}
	if len(last.Policies) != 1 || last.Policies[0].Name != "next" || last.Policies[0].Trial.Hits != 60*n || len(last.Latencies) != 1 {
		t.Errorf("the last reading is %+v, want the shadow and one latency", last)
	}
}
