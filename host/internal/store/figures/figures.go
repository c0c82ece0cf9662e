// Package figures is what a store tells about itself: state and counts of its roots, levels and policies.
package figures

import (
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// Root is the state of one root. What counts up does so since the store was opened.
type Root struct {
	Path      string
	State     health.State
	Reason    string    // why it is not in
	Since     time.Time // that it is in this state; zero from the start
	Outages   uint64    // times that it was taken out
	Stuck     int       // operations that were given up and have not ended
	Capacity  int64
	Limit     int64 // what it may take at present: less than Capacity by directories, and where the file system has less
	Used      int64 // all of the following, and entries on their way out
	Writing   int64 // reserved by pieces in flight: temporaries
	Held      int64 // of quarantine
	Orphaned  int64 // of files that could not be unlinked
	Unscanned int64 // most that files may take which the scan has not come to

	Entries    int // in the index, complete or not
	Complete   int64
	Slots      uint32 // ever used
	MaxEntries uint32
	IndexBytes int64

	Inserted    uint64 // entries reserved
	Published   uint64 // pieces
	Expired     uint64 // entries removed because their time was over
	Discarded   uint64 // entries that clients discarded
	OverBudget  uint64 // puts refused for the daily write budget
	Written     int64  // bytes counted today against the daily write budget; 0 without one
	Aborted     uint64 // pieces
	Recycled    uint64 // victims' files that became the temporaries of puts
	Evictions   uint64 // entries
	Asks        uint64 // times that victims were asked for
	BadVictims  uint64 // named by the policy although pinned, in flight or gone
	Unanswered  uint64 // questions in which the policy named nobody who can go, although somebody could
	Waits       uint64 // puts that waited for the background evictor
	Sheds       uint64 // puts that found no space
	Damaged     uint64 // entries dropped because a file was not what it should be
	Vanished    uint64 // files removed by somebody else
	Quarantined uint64 // files
	SyncFails   uint64
	PlaceFaults uint64 // names that another key's file held
	EvictFaults uint64 // evict policies replaced
	Scanning    bool   // the scan at the start has not ended; what it has not come to is a miss
	Scanned     uint64 // files that it has come to
	Recovered   uint64 // pieces found at the start
	Swept       uint64 // temporaries removed at the start
	Foreign     uint64 // files at the start that are not the store's; left alone
	Unclaimed   uint64 // sound pieces at the start that no name leads to; quarantined

	Least float64 // ratio from which on chunks are compressed; infinite: none is
	Why   string  // what that was measured by; empty: nothing is measured

	Shared *shared.Stats // nil unless hosts share the root

	Evict policy.Stats
}

// Store is the state of a store.
type Store struct {
	Roots    []Root
	Levels   []Level // nearest first
	Refused  uint64  // puts that admission refused
	Resident uint64  // puts of what was there already
	Lookups  uint64
	Keys     uint64 // looked up
	Hits     uint64 // keys granted

	AdmitFaults uint64

	Policies []Policy // those that act, by role
	Shadows  []Shadow
}

// Shadow describes a shadow policy.
type Shadow struct {
	shadow.Stats
	Name    string
	Version string
	Since   time.Time
}

// Policy is a policy that is in use.
type Policy struct {
	policy.Stats
	Name       string
	Version    string
	Root       string // of evict
	Since      time.Time
	Quarantine error            // why it is not started any more
	Counters   map[string]int64 // the module's own, of all its instances and roles
}

// Level is what a level tells: what lookups found there, and what was copied there from other levels.
type Level struct {
	Level  int
	Hits   uint64 // keys granted
	Loaded uint64 // bytes of pieces that were opened for loads
	Around uint64 // entries that went to the next level because demotions from this one were behind
	Moves  [moves.Kinds]Moves

	Published        uint64 // pieces, new ones and copies
	PrefetchesUsed   uint64 // copies that a lookup asked for, and that were loaded afterwards
	PrefetchesWasted uint64 // copies that went without
}

// Moves are the copies of one kind to a level.
type Moves struct {
	Done      uint64
	Bytes     uint64
	Shed      uint64 // not made, because too many were waiting or there was no time
	Refused   uint64 // not wanted
	Cancelled uint64 // not wanted any more, or there already
	Failed    uint64 // faults, and no room
}
