package faultfs

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// When selects calls among those that a rule matches, counted from 1. The zero value selects all.
type When struct {
	First   uint64  // from this call on; 0 is 1
	Last    uint64  // up to this call; 0 is no end
	Every   uint64  // of those each Every-th, beginning with the Every-th; 0 is 1
	Percent float64 // of those each by lot; 0 is 100
	Seed    uint64  // of the lots: the same seed draws the same calls
}

// Fault is what happens to a selected call: first the wait, then the failure.
type Fault struct {
	Delay time.Duration
	Hang  bool       // until [FS.Release]
	Errno unix.Errno // the call fails with it; 0 for none
	After bool       // with Errno: the call is made and then reported as failed
	Short bool       // a read ends, or a write gives up, after Bytes
	Torn  bool       // a read or write claims success, but only the first Bytes are real
	Bytes int64      // -1 for half of the call's
	Power bool       // the machine loses power instead; only over an FS with PowerLoss(seed uint64) error
}

// Rule is one fault and the calls that get it.
type Rule struct {
	Op staging.Op
	// Path is a glob: ** matches anything, * and ? stop at '/'. Without '/' it is matched against the last element.
	// Empty is **.
	Path  string
	When  When
	Fault Fault
}

// about reports whether the rule matches an operation on a name, or on two.
func (r *Rule) about(op staging.Op, name, other string) bool {
	return r.Op&op != 0 && (r.Path == "" || matches(r.Path, name) || other != "" && matches(r.Path, other))
}

// takes reports whether w selects the n-th matching call.
func (w When) takes(n uint64) bool {
	if n < w.First || w.Last != 0 && n > w.Last {
		return false
	}
	if w.Every > 1 && (n-max(1, w.First)+1)%w.Every != 0 {
		return false
	}
	return w.Percent == 0 || float64(lot(w.Seed, n)>>11)/(1<<53)*100 < w.Percent
}

// lot is the n-th random number of a seed: splitmix64 at a position, so that it does not depend on earlier draws.
func lot(seed, n uint64) uint64 {
	x := seed + n*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// matches reports whether the glob matches the name. It backtracks to the latest star of each kind only.
func matches(glob, name string) bool {
	if !strings.Contains(glob, "/") {
		name = name[strings.LastIndexByte(name, '/')+1:]
	}
	var g, n int
	star, starName := -1, 0 // after the last *, and what it has eaten up to
	deep, deepName := -1, 0 // the same of **
	for n < len(name) || g < len(glob) {
		if g < len(glob) {
			switch c := glob[g]; {
			case strings.HasPrefix(glob[g:], "**"):
				g += 2
				deep, deepName, star = g, n, -1
				continue
			case c == '*':
				g++
				star, starName = g, n
				continue
			case n < len(name) && (c == name[n] || c == '?' && name[n] != '/'):
				g++
				n++
				continue
			}
		}
		switch {
		case star >= 0 && starName < len(name) && name[starName] != '/':
			starName++
			g, n = star, starName
		case deep >= 0 && deepName < len(name):
			deepName++
			g, n, star = deep, deepName, -1
		default:
			return false
		}
	}
	return true
}
