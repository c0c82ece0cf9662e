package shared

import (
	"testing"
	"time"
)

// TestCreditAndRecordEndTogether: an incarnation ends while a put publishes. The put gives its credit back, and the next
// incarnation holds no bytes for it: a number below zero would be granted to others.
func TestCreditAndRecordEndTogether(t *testing.T) {
	m := &Member{
		cfg:    Config{Lapse: time.Hour, Now: func() time.Duration { return 1 }},
		wakeup: make(chan struct{}, 1),
	}
	m.beatAt.Store(1)
	m.credits.reset(1)
	m.pending.begin(1)
	m.credits.grant(100)
	credit, ok := m.Take(60)
	if !ok {
		t.Fatal("no credit")
	}
	m.pending.end() // as fence begins
	if m.published("temp", Record{Bytes: 60}, credit) {
		t.Fatal("published in an incarnation that has ended")
	}
	m.credits.reset(0) // as fence ends
	if _, _, _, held := m.credits.settle(0); held != 60 {
		t.Errorf("%d bytes are held while the put goes on, want 60", held)
	}
	m.Give(credit)
	if _, _, _, held := m.credits.settle(0); held != 0 {
		t.Errorf("%d bytes are held when the put has ended, want 0", held)
	}
}
