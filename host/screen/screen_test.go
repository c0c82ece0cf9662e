package screen

import (
	"errors"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/kvhost/kvhost/host/proto"
)

func TestScreen(t *testing.T) {
	roots := func(used uint64) []*proto.RootStatus {
		return []*proto.RootStatus{{Path: "/a", Used: used, Capacity: 4 << 30, State: proto.RootState_ROOT_STATE_READ_ONLY, Scanning: true}}
	}
	route := func(bytes uint64) []*proto.RouteStatus {
		return []*proto.RouteStatus{{Gpu: "host", Root: "/a", Route: "staged", Direction: "load", Bytes: bytes, Files: 1}}
	}
	before := &proto.StatusReply{UptimeSeconds: 10, Counters: map[string]uint64{"lookup_keys": 100, "lookup_hits": 100, "lookups": 10}, Routes: route(0)}
	now := &proto.StatusReply{
		Version: "v1", UptimeSeconds: 12, Roots: roots(1 << 30), Routes: route(3e9), NotReady: []string{"because"},
		Counters: map[string]uint64{"lookup_keys": 200, "lookup_hits": 125, "lookups": 30, "level0_hits": 7, "level2_hits": 5,
			"level2_loaded_bytes": 1 << 30, "level2_demotion": 11, "level2_demotion_shed": 1, "level2_promotion_shed": 2},
		Latencies: []*proto.LatencyStatus{{Answer: "load", Count: 4, Seconds: 0.02, Bounds: []float64{0.001, 0.01}, Buckets: []uint64{1, 3, 0}}},
	}
	for range mostListed + 2 {
		now.SessionList = append(now.SessionList, &proto.SessionStatus{Engine: "e", Since: float64(time.Now().Unix())})
	}
	text := Draw(before, now)
	for _, want := range []string{"up 12s  NOT READY", "  because", "hit ratio 62.5% (now 25.0%)  lookups 10/s  loads 1.50 GB/s",
		"read only, scanning  [###.......]  1.0 GiB  4.0 GiB", "<10ms  <10ms  <10ms  5ms", "... and 2 more",
		"0      7     0 B", "2      5     1.0 GiB  11          0            0           0     0       3"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if text := Draw(now, before); !strings.Contains(text, "loads 0 B/s") { // the host was restarted
		t.Errorf("a restarted host:\n%s", text)
	}
}

// TestTop drives the model of kvhost top by its messages.
func TestTop(t *testing.T) {
	m := &Top{Every: time.Second}
	if !strings.Contains(m.View(), "asking") {
		t.Errorf("before the first answer: %q", m.View())
	}
	send := func(msg tea.Msg) tea.Cmd {
		_, cmd := m.Update(msg)
		return cmd
	}
	status := func(v string) reading {
		return reading{status: &proto.StatusReply{Version: v, UptimeSeconds: 5, NotReady: strings.Fields(strings.Repeat("why ", 50))}}
	}
	send(tea.WindowSizeMsg{Width: 12, Height: 10})
	if send(status("v1")) == nil {
		t.Error("nothing follows the first answer")
	}
	shows := func(want string) {
		t.Helper()
		v := m.View()
		if !strings.Contains(v, want) || strings.Count(v, "\n") != 9 {
			t.Errorf("no %q in ten lines:\n%s", want, v)
		}
	}
	shows("kvhost v1  u\n")
	send(tea.KeyMsg{Type: tea.KeySpace, Runes: []rune{' '}})
	send(status("v2"))
	shows("kvhost v1")
	shows("PAUSED")
	send(tea.KeyMsg{Type: tea.KeySpace, Runes: []rune{' '}})
	send(status("v2"))
	shows("kvhost v2")
	for range 1000 {
		send(tea.KeyMsg{Type: tea.KeyDown})
	}
	shows("scroll")
	if strings.Contains(m.View(), "kvhost v2") {
		t.Errorf("it did not scroll:\n%s", m.View())
	}
	send(reading{err: errors.New("gone")})
	shows("no answer: gone")
	if cmd := send(tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune{'q'}}); cmd == nil {
		t.Error("q does not end it")
	}
}
