package staging

import (
	"testing"
	"time"
)

func TestSpeedFollowsWhatIsSeen(t *testing.T) {
	var s Bandwidth
	if s.Observe(100, time.Second); s.BytesPerSecond() != 0 {
		t.Error("a tiny transfer counts")
	}
	s.Observe(1<<20, time.Second)
	if got := s.BytesPerSecond(); got != 1<<20 {
		t.Errorf("after one transfer: %d", got)
	}
	for range 200 {
		s.Observe(1<<20, time.Second/4)
	}
	if got := s.BytesPerSecond(); got < 4<<20*9/10 || got > 4<<20 {
		t.Errorf("after many: %d, want about %d", got, 4<<20)
	}
}
