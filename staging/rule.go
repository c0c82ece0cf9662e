package staging

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Op names an operation of [FS] or [File] in a fault rule. Ops are bits, so that a rule can be about several.
type Op uint32

// The operations.
const (
	OpOpen Op = 1 << iota
	OpDirect
	OpRead
	OpWrite
	OpSync
	OpAllocate
	OpClose
	OpRename
	OpPublish
	OpLink
	OpRemove
	OpMkdir
	OpReadDir
	OpStat
	OpSyncDir
	OpSyncFS
	OpStatfs
	OpLock

	OpAny = OpLock<<1 - 1
)

// opNames are the ops' words, in the order of their bits.
var opNames = [...]string{
	"open", "direct", "read", "write", "sync", "allocate", "close", "rename", "publish", "link", "remove", "mkdir",
	"readdir", "stat", "syncdir", "syncfs", "statfs", "lock",
}

// When says which of the calls that a rule matches it takes; the calls are counted from 1. The zero value takes all.
type When struct {
	First   uint64  // from this call on; 0 is 1
	Last    uint64  // up to this call; 0 is no end
	Every   uint64  // of those each Every-th, beginning with the Every-th; 0 is 1
	Percent float64 // of those each by lot; 0 is 100
	Seed    uint64  // of the lots: the same seed draws the same calls
}

// Fault is what happens to a call that is taken: first the waiting, then the failing.
type Fault struct {
	Delay time.Duration
	Hang  bool       // until [FaultFS.Release]
	Errno unix.Errno // the call fails with it; 0 for none
	After bool       // with Errno: the call is made, and fails all the same
	Short bool       // a read ends, or a write gives up, after Bytes
	Torn  bool       // a read or write claims success, but only the first Bytes are real
	Bytes int64      // -1 for half of the call's
	Power bool       // the machine loses its power instead of making the call: over a [VolatileFS] only
}

// Rule is one fault: what, where, when and which.
type Rule struct {
	Op    Op
	Path  string // a glob: ** is anything, * and ? stop at '/'; without '/' it is matched against the last element; empty is **
	When  When
	Fault Fault
}

// about says whether the rule is about an operation on a name, or two of them.
func (r *Rule) about(op Op, name, other string) bool {
	return r.Op&op != 0 && (r.Path == "" || matches(r.Path, name) || other != "" && matches(r.Path, other))
}

// takes says whether the rule takes its n-th matching call.
func (w When) takes(n uint64) bool {
	if n < w.First || w.Last != 0 && n > w.Last {
		return false
	}
	if w.Every > 1 && (n-max(1, w.First)+1)%w.Every != 0 {
		return false
	}
	return w.Percent == 0 || float64(lot(w.Seed, n)>>11)/(1<<53)*100 < w.Percent
}

// lot is the n-th draw of a seed: splitmix64 at a position, so that a draw does not depend on which were made before.
func lot(seed, n uint64) uint64 {
	x := seed + n*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// matches says whether the glob fits the name: of two kinds of star only the latest of each can ever need to give way.
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
