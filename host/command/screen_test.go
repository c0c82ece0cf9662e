package command

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

func TestScreen(t *testing.T) {
	roots := func(used uint64) []*proto.RootStatus {
		return []*proto.RootStatus{{Path: "/a", Used: used, Capacity: 4 << 30, State: proto.RootState_ROOT_STATE_READ_ONLY, Scanning: true, Reason: "it is so"}}
	}
	route := func(bytes uint64) []*proto.RouteStatus {
		return []*proto.RouteStatus{{Gpu: "host", Root: "/a", Route: proto.Route_ROUTE_STAGED, Direction: proto.Direction_DIRECTION_LOAD, Bytes: bytes, Files: 1}}
	}
	before := &proto.StatusResponse{Uptime: durationpb.New(10 * time.Second), Counters: map[string]uint64{"lookup_keys": 100, "lookup_hits": 100, "lookups": 10}, Routes: route(0)}
	now := &proto.StatusResponse{
		Version: "v1", Uptime: durationpb.New(12 * time.Second), Roots: roots(1 << 30), Routes: route(3e9), NotReady: []string{"because"},
		Counters: map[string]uint64{"lookup_keys": 200, "lookup_hits": 125, "lookups": 30, "level0_hits": 7, "level0_volatile": 50, "level0_kept": 35, "level2_hits": 5,
			"level2_loaded_bytes": 1 << 30, "level2_demotion": 11, "level2_demotion_shed": 1, "level2_promotion_shed": 2},
		Latencies: []*proto.LatencyStatus{{Answer: proto.Answer_ANSWER_LOAD, Count: 4, Sum: durationpb.New(20 * time.Millisecond),
			Bounds: []*durationpb.Duration{{Nanos: 1e6}, {Nanos: 10e6}}, Buckets: []uint64{1, 3, 0}}},
	}
	for range mostListed + 2 {
		now.SessionList = append(now.SessionList, &proto.SessionStatus{Engine: "e", Since: timestamppb.Now()})
	}
	text := drawScreen(before, now)
	for _, want := range []string{"up 12s  NOT READY", "  because", "hit ratio 62.5% (now 25.0%)  lookups 10/s  loads 1.4 GiB/s",
		"read only, scanning  [###.......]  1 GiB  4 GiB", "/a is read only: it is so", "<10ms  <10ms  <10ms  5ms", "... and 2 more",
		"70.0%  0\n", "2      5     1 GiB   11          0            0           0     -      3"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if text := drawScreen(now, before); !strings.Contains(text, "loads 0 B/s") { // the host was restarted
		t.Errorf("a restarted host:\n%s", text)
	}
}

// What is bad is red on a terminal, unless NO_COLOR is set.
func TestBadLinesAreRed(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	for line, red := range map[string]bool{
		"kvhost v1  up 12s  NOT READY": true, "/a  full         [###.......]  1 GiB": true, "/b  out, scanning  [": true,
		"main  evict  quarantine  x.wasm": true, "/a  in service  [###.......]": false, "/full  in service  [": false, "kvhost v1  up 12s  ready": false,
	} {
		if got := paint(line); (got != line) != red || red && got != "\x1b[31m"+line+"\x1b[39m" {
			t.Errorf("%q is painted %q, want red: %v", line, got, red)
		}
	}
	t.Setenv("NO_COLOR", "1")
	if got := paint("NOT READY"); got != "NOT READY" {
		t.Errorf("with NO_COLOR: %q, want no colour", got)
	}
}

// A frame fits the terminal, and says when the host gives no answer.
func TestFrame(t *testing.T) {
	top := &topScreen{size: func() (int, int) { return 12, 10 }}
	status := &proto.StatusResponse{Version: "v1", Uptime: durationpb.New(5 * time.Second), NotReady: strings.Fields(strings.Repeat("why ", 50))}
	for _, c := range []struct {
		name    string
		status  *proto.StatusResponse
		failure error
		lines   int
		want    []string
	}{
		{"long", status, nil, 10, []string{"kvhost v1  u" + restOfLine, "44 more line" + restOfLine}},
		{"no answer", status, errors.New("gone"), 10, []string{"kvhost v1  u", "no answer: g"}},
		{"no answer yet", nil, errors.New("host: gone\nlong ago"), 1, []string{"no answer: g"}},
	} {
		frame := top.frame(c.status, c.status, c.failure)
		if got := strings.Count(frame, "\n") + 1; got != c.lines || !strings.HasPrefix(frame, home) || !strings.HasSuffix(frame, restOfScreen) {
			t.Errorf("%s: want %d lines from the top of a screen whose rest is erased, got %d: %q", c.name, c.lines, got, frame)
		}
		for _, want := range c.want {
			if !strings.Contains(frame, want) {
				t.Errorf("%s: want %q in the frame, got %q", c.name, want, frame)
			}
		}
	}
}

func TestBucketBounds(t *testing.T) {
	bounds := []float64{1, 2, 4}
	for _, c := range []struct {
		q       float64
		buckets []uint64
		want    float64
	}{
		{0.5, []uint64{0, 0, 0, 0}, 0},
		{0.5, []uint64{1, 1, 0, 0}, 1},
		{0.99, []uint64{98, 1, 1, 0}, 2},
		{1, []uint64{98, 1, 1, 0}, 4},
		{0.99, []uint64{0, 0, 0, 5}, 4},
	} {
		if got := bucketBound(c.q, bounds, c.buckets); got != c.want {
			t.Errorf("quantile %v of %v: %v, want %v", c.q, c.buckets, got, c.want)
		}
	}
}
