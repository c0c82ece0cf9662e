package store

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// MaxLevels is the highest level of a root plus one.
const MaxLevels = 8

// Medium is the place of a root's bytes. It is one of the two axes of a root. The other is the hosts that write there: see
// [RootConfig.Shared].
type Medium struct {
	FS staging.FS // nil means Config.FS
	Traits
	// Lender is set for a root with bytes of other hosts: FS holds the files of [Store.Borrow] and takes no stores. Such a root
	// must be behind all others.
	Lender Lender
}

// Traits are the properties of a medium that determine how a root uses it. A directory of the operating system has none of
// them.
type Traits struct {
	NoDirectory bool // RootConfig.Path is only a name in FS
	Volatile    bool // the bytes are lost when the host stops; an orderly stop copies them to the next level
	WriteOnce   bool // a published file cannot be written again, so a put cannot reuse the file of a victim
	Remote      bool // the bytes are objects on a server that other hosts reach just as fast
}

// Traits of the media other than a directory.
var (
	Memory = Traits{NoDirectory: true, Volatile: true}
	Bucket = Traits{NoDirectory: true, WriteOnce: true, Remote: true}
	Lent   = Traits{NoDirectory: true, WriteOnce: true}
)

// RootConfig configures a root, which holds pieces.
type RootConfig struct {
	Path string // created with mode 0700 if missing; the directory above must exist
	Medium
	Capacity     int64          // most bytes of pieces, temporaries and quarantine together
	Write        Write          // time at which the next level gets a copy of a stored entry
	Compressed   bool           // compress stored pieces according to Config.Compression
	Level        int            // 0 is the nearest level, where entries are stored and looked up first
	Shared       bool           // other hosts use the root, too, so there is no exclusive lock
	RequireMount bool           // the root must not be on the file system of /
	MaxEntries   uint32         // most entries; 0 means a number derived from the capacity
	DailyWrites  int64          // bytes that may be written in a day (UTC); 0 means no limit
	ForPieces    bool           // directories do not count against Capacity
	MinFree      int64          // bytes to leave free on the file system; files of others count as used
	MinFreePart  float64        // the same as a part of the file system; the larger of the two applies
	Evict        *policy.Handle // borrowed; nil means the policy in Policies

	Poll      time.Duration       // with Shared: interval at which hosts read the stores of others; 0 means 1 s
	Lapse     time.Duration       // with Shared: time of silence after which the others exclude a host; 0 means 10 s
	Scheduler *Scheduler          // with Shared, in tests only
	Speeds    func() codec.Speeds // with Compressed, in tests only
}

// Write determines when the next level gets a copy of an entry that is stored in a root. An entry that leaves the root without
// a copy is copied then, if the level wants it and there is time.
type Write uint8

const (
	WriteBack    Write = iota // when it is about to leave
	WriteHits                 // also when it was loaded
	WriteThrough              // when it is stored, and again when it was loaded if there was no time before
)

// bounds returns the bounds of the root's account.
func (r *RootConfig) bounds() capacity.Bounds {
	return capacity.Bounds{Capacity: r.Capacity, ForPieces: r.ForPieces, MinFree: r.MinFree, MinFreePart: r.MinFreePart}
}

// Moves configures the copies between levels. Zero values have the defaults of [moves.Config].
type Moves struct {
	Workers   int
	Bandwidth int64         // bytes a second
	Waiting   time.Duration // most time that waiting entries may need
	Shutdown  time.Duration // most time that Close takes to copy the entries of volatile roots; 0 means that it copies nothing
}

// Quota limits the bytes of each tenant's entries.
type Quota = capacity.Quota

// Config configures a store. Roots is required, each with Path and Capacity. Other zero values have defaults.
type Config struct {
	Roots    []RootConfig
	Strict   bool // make a piece's bytes and name durable before it is resident; otherwise a power failure may lose them
	Policies Policies
	FS       staging.FS // file system of roots without one; nil means the operating system's, below each root
	Log      *slog.Logger
	Seed     uint64
	Now      func() time.Time
	HostID   string // marks this host's temporaries: 1 to 32 characters of [a-z0-9]; empty means an id derived from the machine's
	Dry      bool   // see [Open]
	Stepped  bool   // the store has no background work: see [Store.Step]
	// Making is called when Open is about to create the directory of a root, possibly on several goroutines. An error prevents
	// the creation. It may be nil.
	Making func() error

	Compression codec.Modes // for roots with RootConfig.Compressed
	Expiries    []Expiry    // expiry of entries by model; the first match applies, and without a match entries do not expire
	Quotas      []Quota     // the first that covers a tenant applies

	IOTimeout   time.Duration // limit of a file operation, after which its root is taken out; 0 means 30 s, negative means no limit
	UpkeepEvery time.Duration // interval of the upkeep of a root, and unit of the pauses between probes; 0 means 1 s

	Moves Moves

	QuarantineFiles int           // most damaged files kept per root; 0 means 64, negative means none
	ScanWorkers     int           // goroutines of the scan at Open per root; 0 means 8
	ScanWait        time.Duration // time that Open waits for scans, which continue afterwards; 0 means 1 s, negative means no wait

	lender Lender // lender of the root that has one, or nil
}

const (
	maxRoots        = 64
	defaultSlots    = 1 << 21
	smallestEntry   = 2 * pieceformat.Page
	usualEntry      = 1 << 20
	defaultKept     = 64
	defaultScanners = 8
	defaultPoll     = time.Second
	defaultLapse    = 10 * time.Second
)

// complete checks the configuration and fills in the defaults.
func (c *Config) complete() error {
	if len(c.Roots) == 0 || len(c.Roots) > maxRoots {
		return fmt.Errorf("%w: %d roots, want 1 to %d", ErrConfig, len(c.Roots), maxRoots)
	}
	roots := make([]RootConfig, len(c.Roots))
	seen := map[string]bool{}
	for i, r := range c.Roots {
		if r.Path == "" || r.Capacity < smallestEntry {
			return fmt.Errorf("%w: root %q with a capacity of %d bytes", ErrConfig, r.Path, r.Capacity)
		}
		if r.DailyWrites < 0 || r.MinFree < 0 || !(r.MinFreePart >= 0 && r.MinFreePart < 1) {
			return fmt.Errorf("%w: root %q is to leave %d bytes or %g of its file system free, "+
				"and %d bytes are to be written a day", ErrConfig, r.Path, r.MinFree, r.MinFreePart, r.DailyWrites)
		}
		if r.Lender != nil && (i < len(c.Roots)-1 || slices.ContainsFunc(c.Roots[:i], func(o RootConfig) bool { return o.Level >= r.Level })) {
			return fmt.Errorf("%w: root %q, of what other hosts lend, is not behind all others", ErrConfig, r.Path)
		}
		if r.Level < 0 || r.Level >= MaxLevels {
			return fmt.Errorf("%w: root %q has the level %d, want 0 to %d", ErrConfig, r.Path, r.Level, MaxLevels-1)
		}
		abs, err := r.Path, error(nil)
		if r.FS == nil {
			abs, err = filepath.Abs(r.Path)
			if r.FS = c.FS; r.FS == nil {
				r.FS = staging.Below(abs)
			}
		}
		if err != nil {
			return fmt.Errorf("%w: root %q: %w", ErrConfig, r.Path, err)
		}
		if seen[abs] {
			return fmt.Errorf("%w: root %q twice", ErrConfig, abs)
		}
		seen[abs], r.Path = true, abs
		r.MaxEntries = cmp.Or(r.MaxEntries, SlotsFor(r.Capacity))
		r.Poll, r.Lapse = cmp.Or(r.Poll, defaultPoll), cmp.Or(r.Lapse, defaultLapse)
		if r.Shared && (r.Poll < 0 || r.Lapse < 4*r.Poll) {
			return fmt.Errorf("%w: root %q: a lapse of %s with a poll of %s, want at least four polls", ErrConfig, r.Path,
				r.Lapse, r.Poll)
		}
		roots[i], c.lender = r, r.Lender
	}
	c.Roots = roots
	c.IOTimeout, c.ScanWait = cmp.Or(c.IOTimeout, 30*time.Second), cmp.Or(c.ScanWait, time.Second)
	c.QuarantineFiles, c.HostID = cmp.Or(c.QuarantineFiles, defaultKept), cmp.Or(c.HostID, machineID())
	for _, e := range c.Expiries {
		if _, err := path.Match(e.Model, ""); err != nil || e.TTL <= 0 {
			return fmt.Errorf("%w: entries of %q are to expire after %s: want a pattern, and a time above 0", ErrConfig, e.Model, e.TTL)
		}
	}
	if err := capacity.Quotas(c.Quotas).Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.UpkeepEvery <= 0 {
		c.UpkeepEvery = time.Second
	}
	if c.ScanWorkers <= 0 {
		c.ScanWorkers = defaultScanners
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Now == nil {
		c.Now = time.Now
	}
	if !pieceformat.ValidHostID(c.HostID) {
		return fmt.Errorf("%w: host id %q, want 1 to 32 of [a-z0-9]", ErrConfig, c.HostID)
	}
	return nil
}

// evicts returns the policy of a root, or nil for the built-in one. A root of borrowed entries gets the built-in one, because
// its entries stay only as long as leases.
func (c *Config) evicts(r *RootConfig) *policy.Handle {
	switch {
	case r.Lender != nil:
		return nil
	case r.Evict != nil:
		return r.Evict
	}
	return c.Policies.Evict
}

// SlotsFor returns the largest number of entries that is expected in a capacity in bytes.
func SlotsFor(capacity int64) uint32 {
	return uint32(max(min(capacity/smallestEntry+1, defaultSlots), min(capacity/usualEntry, 1<<30)))
}

// machineID returns an id that survives restarts and differs between machines.
func machineID() string {
	id, err := os.ReadFile("/etc/machine-id")
	if err != nil || len(id) == 0 {
		name, _ := os.Hostname()
		id = []byte(name)
	}
	h := fnv.New64a()
	h.Write(id)
	return fmt.Sprintf("%016x", h.Sum64())
}

// Policies assigns policies. Evict is bound to roots, the other roles are bound to namespaces. A namespace gets the policy of
// the first rule of a role that matches it, and the role's own field if none matches. The handles are borrowed until Open
// returns. A nil handle means the built-in policy.
type Policies struct {
	Evict, Admit, Place, Layout *policy.Handle
	Rules                       []catalog.Rule
	Shadows                     []Shadow
}

// Shadow is an evict policy without effect. It receives all requests and manages an imaginary cache.
type Shadow struct {
	Policy   *policy.Handle // borrowed
	Capacity int64          // bytes of the imaginary cache; 0 means the capacity of the roots together
}

// Capacity returns the capacity of all roots of this host.
func (c *Config) Capacity() (all int64) {
	for i := range c.Roots {
		if c.Roots[i].Lender == nil {
			all += c.Roots[i].Capacity
		}
	}
	return all
}

// wish returns the configuration of a shadow for these roots.
func (c *Config) wish(h Shadow) shadow.Wish {
	capacity := cmp.Or(h.Capacity, c.Capacity())
	return shadow.Wish{Policy: h.Policy, Options: policy.EvictOptions{
		MaxSlots: SlotsFor(capacity), Capacity: uint64(capacity), Seed: c.Seed, Config: h.Policy.Config,
	}}
}

// Expiry is the time to live of entries of some models.
type Expiry struct {
	Model string // pattern for the model of the namespace, as in [path.Match]
	TTL   time.Duration
}

// ttl returns the time to live of a namespace's entries according to the first matching pattern. 0 means no limit.
func (c *Config) ttl(text string) time.Duration {
	for _, e := range c.Expiries {
		if fits, _ := path.Match(e.Model, kv.Field(text, "model")); fits {
			return e.TTL
		}
	}
	return 0
}

// Lender is the interface to the other hosts that lend entries.
type Lender interface {
	// Blame reports that the file of a piece could not be read or had the wrong content. The entry is dropped.
	Blame(name string, cause error)
	// Copies returns the number of other hosts that are known to have an entry. It sends no message.
	Copies(fp uint64) int
	// Takes reports whether there is a host that may take entries evicted by this one.
	Takes() bool
	// Offer offers an entry to that host and waits for the result. The error is [moves.ErrRefused] if the host does not take
	// the entry.
	Offer(ctx context.Context, o *Offer) error
}

// Scheduler replaces the clock and the timers of a shared root in tests, so that the interaction of its hosts can be repeated
// from a seed. A host makes a step when [Store.Maintain] is called, one host at a time.
type Scheduler struct {
	Now func() time.Duration
	// Wait is called where a host would wait for other hosts. It lets each of them make a step, and calls step to let the
	// waiting host make one.
	Wait func(step func())
}

// Offer is an entry that is offered to another host.
type Offer struct {
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
	Tenant    uint32
	Ranks     uint64
	Lease     *Lease // holds only this entry; ends when Offer returns
}
