package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A tool that can be built is built when a test asks for it. What keeps it from that is told.
func TestNeedBuilds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tool")
	there := func() bool { _, err := os.Stat(file); return err == nil }
	never := func() bool { return false }
	lacking := &Tool{Name: "lacking", Other: "get it", probe: never}
	t.Setenv("TOOL", file)
	t.Setenv(Require, "")
	for _, c := range []struct {
		tool *Tool
		want string
	}{
		{&Tool{Name: "late", After: lacking, probe: there, build: []string{"sh", "-c", `: >"$TOOL"`}}, "skipped: missing: lacking: get it"},
		{&Tool{Name: "made", probe: there, build: []string{"sh", "-c", `: >"$TOOL"`}}, "ran"},
		{&Tool{Name: "broken", Other: "make it", probe: never, build: []string{"sh", "-c", "echo no network; exit 3"}},
			"skipped: missing: broken: make it (sh -c echo no network; exit 3 failed: exit status 3: no network)"},
	} {
		if got := need(c.tool); got != c.want {
			t.Errorf("a test that needs %s: %q, want %q", c.tool.Name, got, c.want)
		}
	}
}

// outcome is how a test ends that needs a tool.
type outcome struct {
	testing.TB
	how string
}

func (o *outcome) Helper() {}
func (o *outcome) Skipf(format string, args ...any) {
	o.how = "skipped: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}
func (o *outcome) Fatalf(format string, args ...any) {
	o.how = "failed: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func need(tools ...*Tool) string {
	o := &outcome{how: "ran"}
	done := make(chan struct{})
	go func() {
		defer close(done)
		Need(o, tools...)
	}()
	<-done
	return o.how
}

func TestNeed(t *testing.T) {
	here := &Tool{Name: "here", probe: func() bool { return true }}
	gone := &Tool{Name: "gone", Packages: "gone-dev", Other: "build it", probe: func() bool { return false }}
	later := &Tool{Name: "later", Other: "gone it", After: gone, probe: func() bool { return false }}
	right := &Tool{Name: "right", Other: "ask", Optional: true, probe: func() bool { return false }}
	const missing = "missing: gone: apt-get install gone-dev, or build it"
	for _, c := range []struct {
		required string
		tools    []*Tool
		want     string
	}{
		{"", []*Tool{here}, "ran"},
		{"", []*Tool{here, gone}, "skipped: " + missing},
		{"", []*Tool{later}, "skipped: " + missing},
		{"", []*Tool{right}, "skipped: missing: right: ask"},
		{"1", []*Tool{here}, "ran"},
		{"1", []*Tool{here, gone}, "failed: " + missing},
		{"1", []*Tool{later}, "failed: " + missing},
		{"1", []*Tool{right}, "skipped: missing: right: ask"},
	} {
		t.Setenv(Require, c.required)
		if got := need(c.tools...); !strings.HasPrefix(got, c.want) {
			t.Errorf("a test that needs %d tools, with %s=%s: %s, want %s", len(c.tools), Require, c.required, got, c.want)
		}
	}
}

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
