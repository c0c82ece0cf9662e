package testenv

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// hurried is a test whose deadline is near, and which keeps what it is ended with.
type hurried struct {
	testing.TB
	end  time.Time
	said string
}

func (h *hurried) Helper()                     {}
func (h *hurried) Deadline() (time.Time, bool) { return h.end, true }
func (h *hurried) Fatalf(format string, args ...any) {
	h.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// A wait ends with its event, or shortly before the test's deadline with what was there instead, by a bubble's clock, too.
func TestWaitsEndBeforeTheDeadline(t *testing.T) {
	n := 0
	Until(t, "the third look", func() bool { n++; return n == 3 })
	if n != 3 {
		t.Errorf("%d looks, want 3", n)
	}
	sent := make(chan int, 1)
	sent <- 7
	if got := Receive(t, "a number", sent); got != 7 {
		t.Errorf("received %d, want 7", got)
	}
	for name, wait := range map[string]func(testing.TB){
		"Until": func(t testing.TB) {
			Until(t, "the event", func() bool { return false }, func() any { return "nothing" })
		},
		"Receive": func(t testing.TB) { Receive(t, "the event", make(chan int), func() any { return "nothing" }) },
	} {
		ends := func(t *testing.T) {
			h := &hurried{TB: t, end: time.Now().Add(20 * time.Millisecond)}
			done := make(chan struct{})
			go func() {
				defer close(done)
				wait(h)
			}()
			<-done
			if !strings.HasPrefix(h.said, "the event: not") || !strings.HasSuffix(h.said, "\nnothing") {
				t.Errorf("%s without an event ended with %q, want the event and what was there", name, h.said)
			}
		}
		t.Run(name, ends)
		t.Run(name+" in a bubble", func(t *testing.T) { synctest.Test(t, ends) })
	}
}
