package testenv

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// longestPause is between two looks of [Until].
const longestPause = 20 * time.Millisecond

// Until waits until done is true: of what has no event of its own that the test could wait for. Only the test's own deadline bounds
// it, so that a slow machine fails nothing. Then the test ends with what was waited for, and what was there instead.
func Until(t testing.TB, what string, done func() bool, state ...func() any) {
	t.Helper()
	begin := time.Now()
	end, bounded := patience(t)
	for !done() {
		waited := time.Since(begin)
		if bounded && time.Now().After(end) {
			t.Fatalf("%s: not in %s, until shortly before the test's deadline%s", what, waited.Round(time.Second), told(state))
		}
		time.Sleep(min(max(waited/16, 200*time.Microsecond), longestPause))
	}
}

// Receive takes what a channel brings, or its end, with the bound and the words of [Until].
func Receive[T any](t testing.TB, what string, from <-chan T, state ...func() any) (got T) {
	t.Helper()
	ctx := Context(t)
	select {
	case got = <-from:
	case <-ctx.Done():
		t.Fatalf("%s: not until shortly before the test's deadline%s", what, told(state))
	}
	return got
}

// Context ends shortly before the test's deadline, or with the test.
func Context(t testing.TB) context.Context {
	t.Helper()
	end, bounded := patience(t)
	if !bounded {
		return t.Context()
	}
	ctx, cancel := context.WithDeadline(t.Context(), end)
	t.Cleanup(cancel)
	return ctx
}

// bubbles end before this year: their clock begins in 2000.
const bubbles = 2020

// patience is the time of the test's deadline, less a twentieth of what is left: to say what was there, and to end it. In a bubble,
// where no machine is slow, it is an hour.
func patience(t testing.TB) (end time.Time, bounded bool) {
	now := time.Now()
	if now.Year() < bubbles {
		return now.Add(time.Hour), true
	}
	timed, ok := t.(interface{ Deadline() (time.Time, bool) })
	if !ok {
		return end, false // a benchmark
	}
	deadline, bounded := timed.Deadline()
	return deadline.Add(-time.Until(deadline) / 20), bounded
}

func told(state []func() any) (text string) {
	for _, s := range state {
		text += fmt.Sprintf("\n%v", s())
	}
	return text
}

// Deadline is when [Context] ends, for what takes a time; zero: never.
func Deadline(t testing.TB) time.Time {
	if end, bounded := patience(t); bounded {
		return end
	}
	return time.Time{}
}
