package metamorphic

import (
	"slices"
	"time"
)

// Shorten returns a shorter history that fails too: it leaves operations and fault rules out, many at once and then
// fewer, and keeps what is left while fails says that it fails. It stops at the deadline.
func Shorten(h *History, fails func(*History) bool, deadline time.Time) *History {
	best := *h
	for size := max(1, len(best.Ops)/2); ; size = (size + 1) / 2 {
		shorter := false
		for from := 0; from < len(best.Ops); {
			if time.Now().After(deadline) {
				return &best
			}
			try := best
			try.Ops = slices.Delete(slices.Clone(best.Ops), from, min(from+size, len(best.Ops)))
			if fails(&try) {
				best, shorter = try, true
			} else {
				from += size
			}
		}
		for i := 0; i < len(best.Faults); {
			if time.Now().After(deadline) {
				return &best
			}
			try := best
			try.Faults = slices.Delete(slices.Clone(best.Faults), i, i+1)
			if fails(&try) {
				best, shorter = try, true
			} else {
				i++
			}
		}
		if size == 1 && !shorter {
			return &best
		}
	}
}
