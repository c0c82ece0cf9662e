package faultfs

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// When selects calls among those that a rule matches, counted from 1. The zero value selects all.
type When struct {
	Nth     uint64  // this call alone; 0: all
	First   uint64  // this call and all later ones
	Percent float64 // of the calls each by lot; 0 is 100
	Seed    uint64  // of the lots: the same seed draws the same calls
}

// Fault is what happens to a selected call: first the wait, then the failure.
type Fault struct {
	Delay time.Duration
	Hang  bool       // until [FS.Release]
	Errno unix.Errno // the call fails with it; 0 for none
	After bool       // with Errno: the call is made and then reported as failed
	Short bool       // a read ends, or a write fails, after Bytes
	Torn  bool       // a read or write claims success, but only the first Bytes are real, of a direct write whole pages
	Bytes int64      // -1 for half of the call's
	Power bool       // the machine loses power instead; only over a [Machine]
}

// Rule is one fault and the calls that get it.
type Rule struct {
	Op staging.Op
	// Path is a glob: ** matches anything, * and ? stop at '/'. Without '/' it is matched against the last element.
	Path  string
	When  When
	Fault Fault
}

// about reports whether the rule matches an operation on a name, or on two.
func (r *Rule) about(op staging.Op, name, other string) bool {
	return r.Op&op != 0 && (matches(r.Path, name) || other != "" && matches(r.Path, other))
}

// takes reports whether w selects the n-th matching call.
func (w When) takes(n uint64) bool {
	return (w.Nth == 0 || n == w.Nth) && n >= w.First &&
		(w.Percent == 0 || float64(lot(w.Seed, n)>>11)/(1<<53)*100 < w.Percent)
}

// lot is the n-th random number of a seed: splitmix64 at a position, so that it does not depend on earlier draws.
func lot(seed, n uint64) uint64 {
	x := seed + n*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// matches reports whether the glob matches the name.
func matches(glob, name string) bool {
	if !strings.Contains(glob, "/") {
		name = name[strings.LastIndexByte(name, '/')+1:]
	}
	return matchesFrom(glob, name)
}

func matchesFrom(glob, name string) bool {
	switch {
	case glob == "":
		return name == ""
	case strings.HasPrefix(glob, "**"):
		return matchesFrom(glob[2:], name) || name != "" && matchesFrom(glob, name[1:])
	case glob[0] == '*':
		return matchesFrom(glob[1:], name) || name != "" && name[0] != '/' && matchesFrom(glob, name[1:])
	case name == "":
		return false
	}
	return (glob[0] == name[0] || glob[0] == '?' && name[0] != '/') && matchesFrom(glob[1:], name[1:])
}

// ParseRules parses rules, one per line:
//
//	OPS PATH [WHEN]: FAULT
//
// OPS are words of [staging.Op] joined by commas, or "any". PATH is [Rule]'s glob, without white space or colons. WHEN is
// "3rd" for the third matching call alone, "3rd-" for it and all later ones, or "10% seed 7" for one in ten, at
// random. FAULT is a wait, a failure, or both in this order. A wait is "delay 20ms" or "hang". A failure is an errno ("eio";
// "eio after" makes the call and reports it as failed), "short [BYTES]", "torn [BYTES]" or "power".
func ParseRules(text string) (rules []Rule, err error) {
	for line := range strings.Lines(text) {
		head, fault, found := strings.Cut(strings.TrimSpace(line), ":")
		if !found {
			return nil, fmt.Errorf("%w: no ':' in %q", ErrRule, line)
		}
		words := strings.Fields(head)
		if len(words) < 2 {
			return nil, fmt.Errorf("%w: want OPS PATH [WHEN]: FAULT, got %q", ErrRule, line)
		}
		r := Rule{Path: words[1]}
		if r.Op, err = parseOps(words[0]); err == nil {
			if r.When, err = parseWhen(words[2:]); err == nil {
				r.Fault, err = parseFault(strings.Fields(fault))
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w in %q", ErrRule, err, line)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// MustRules is [ParseRules] for constant text. It panics on an error.
func MustRules(text string) []Rule {
	rules, err := ParseRules(text)
	if err != nil {
		panic(err)
	}
	return rules
}

func parseOps(word string) (ops staging.Op, err error) {
	if word == "any" {
		return staging.OpAny, nil
	}
	for name := range strings.SplitSeq(word, ",") {
		op := staging.Op(1)
		for op <= staging.OpLock && op.String() != name {
			op <<= 1
		}
		if op > staging.OpLock {
			return 0, fmt.Errorf("unknown operation %q", name)
		}
		ops |= op
	}
	return ops, nil
}

func parseWhen(words []string) (w When, err error) {
	switch percent, random := strings.CutSuffix(strings.Join(words, " "), "%"); {
	case len(words) == 0:
	case len(words) == 3 && words[1] == "seed":
		if w.Percent, err = strconv.ParseFloat(strings.TrimSuffix(words[0], "%"), 64); err == nil {
			w.Seed, err = strconv.ParseUint(words[2], 10, 64)
		}
	case random:
		w.Percent, err = strconv.ParseFloat(percent, 64)
	case len(words) == 1:
		call, open := strings.CutSuffix(words[0], "-")
		if w.Nth, err = strconv.ParseUint(strings.TrimRight(call, "stndrh"), 10, 64); open {
			w.Nth, w.First = 0, w.Nth
		}
	default:
		err = fmt.Errorf("unexpected %q", words)
	}
	if err == nil && len(words) > 0 && w.Nth == 0 && w.First == 0 && !(w.Percent > 0 && w.Percent <= 100) {
		err = fmt.Errorf("%q is neither a call such as 3rd nor a part above 0%% and at most 100%%", words)
	}
	return w, err
}

// errnoOf is the number of a name in small letters, 0 if it is of none.
func errnoOf(name string) unix.Errno {
	for e := unix.Errno(1); e < 256; e++ {
		if strings.ToLower(unix.ErrnoName(e)) == name {
			return e
		}
	}
	return 0
}

func parseFault(words []string) (f Fault, err error) {
	next := func() (w string) {
		if len(words) > 0 {
			w, words = words[0], words[1:]
		}
		return w
	}
	word := next()
	switch word {
	case "":
		return f, errors.New("no fault after ':'")
	case "hang":
		f.Hang = true
		word = next()
	case "delay":
		f.Delay, err = time.ParseDuration(next())
		word = next()
	}
	switch {
	case err != nil || word == "":
	case word == "power":
		f.Power = true
	case word == "short" || word == "torn":
		f.Short, f.Torn = word == "short", word == "torn"
		f.Bytes = -1
		if len(words) > 0 {
			f.Bytes, err = strconv.ParseInt(next(), 10, 64)
		}
	default:
		if f.Errno = errnoOf(word); f.Errno == 0 {
			return f, fmt.Errorf("unknown fault %q", word)
		}
		if len(words) == 1 && words[0] == "after" {
			f.After = true
			next()
		}
	}
	if err == nil && len(words) > 0 {
		err = fmt.Errorf("unexpected %q", words)
	}
	return f, err
}
