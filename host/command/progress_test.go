package command

import (
	"strings"
	"testing"
	"time"
)

func TestProgress(t *testing.T) {
	var out strings.Builder
	now := time.Unix(1000, 0)
	p := &progress{out: &out, unit: "files", width: 60, now: func() time.Time { return now }}
	expect := func(what, want string) {
		t.Helper()
		if got := strings.TrimSpace(strings.TrimPrefix(out.String(), "\r")); got != want {
			t.Errorf("line of progress %s: got %q, want %q", what, got, want)
		}
		out.Reset()
	}
	p.Begin(200)
	now = now.Add(10 * time.Second)
	p.Step(50, "1.25 GB")
	expect("a quarter in 10 s", "50/200 files [=====---------------] 1.25 GB, 30s left")
	now = now.Add(redraw / 2)
	p.Step(50, "2.50 GB")
	expect("again too soon", "")
	now = now.Add(redraw)
	p.Step(100, "")
	expect("all", "200/200 files [====================] 2.50 GB")
	p.Step(0, strings.Repeat("x", 200))
	now = now.Add(redraw)
	p.Step(10, "")
	if line := strings.TrimPrefix(out.String(), "\r"); len(line) != p.width-1 {
		t.Errorf("a line of %d columns on a terminal of %d", len(line), p.width)
	}
	out.Reset()
	p.End()
	expect("the end", "")
}
