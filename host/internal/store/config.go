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

// MaxLevels is one more than the highest level of a root.
const MaxLevels = 8

// Medium is where the bytes of a root lie: one of the two axes of a root. The other is who writes there; see [RootConfig.Shared].
type Medium struct {
	FS staging.FS // nil: Config.FS
	Traits
	// Lender stands for the other hosts where the bytes are theirs: FS has the files of [Store.Borrow], and takes no stores. Such a root
	// is behind all others.
	Lender Lender
}

// Traits are the properties of a medium that a root asks for. A directory of the operating system has none of them.
type Traits struct {
	NoDirectory bool // RootConfig.Path is a name in FS alone
	Volatile    bool // the bytes go with the host: an orderly end copies them to the next level
	WriteOnce   bool // a file that has its name cannot be written again, so that no put gets a victim's
	Remote      bool // the bytes are objects of a server, which other hosts reach as soon as this one
}

// The media besides a directory.
var (
	Memory = Traits{NoDirectory: true, Volatile: true}
	Bucket = Traits{NoDirectory: true, WriteOnce: true, Remote: true}
	Lent   = Traits{NoDirectory: true, WriteOnce: true}
)

// RootConfig is one directory that holds pieces.
type RootConfig struct {
	Path string // made when missing, with mode 0700, in a directory that is there
	Medium
	Capacity     int64          // bytes that pieces, temporaries and quarantine may take together
	Write        Write          // when the next level gets what is stored
	Compressed   bool           // pieces that are stored here are compressed, as Config.Compression says
	Level        int            // 0 is nearest: entries are stored there, and looked for there first
	Shared       bool           // other hosts use it too: no exclusive lock
	RequireMount bool           // it must not be on the file system of /
	MaxEntries   uint32         // most entries there can be; 0: by capacity
	DailyWrites  int64          // bytes that may be written in a day (UTC); 0: as many as come
	ForPieces    bool           // Capacity is for pieces alone: directories come on top
	MinFree      int64          // bytes that are left free on the file system, for others; it counts what others take
	MinFreePart  float64        // the same as a part of the file system; the larger of the two holds
	Evict        *policy.Handle // borrowed; nil: as Policies says

	Poll      time.Duration       // of Shared: how soon the hosts see what others have stored: 1 s
	Lapse     time.Duration       // of Shared: how long a host can be silent before the others give it up: 10 s
	Scheduler *Scheduler          // of Shared, in tests
	Speeds    func() codec.Speeds // of Compressed, in tests
}

// Write is when the next level gets a copy of what is stored in a root. What leaves the root without one is copied then, if the level
// wants it and there is time.
type Write uint8

const (
	WriteBack    Write = iota // when it is about to leave
	WriteHits                 // when it was loaded, too
	WriteThrough              // when it is stored, and again when it was loaded if there was no time
)

// bounds are what the root may take.
func (r *RootConfig) bounds() capacity.Bounds {
	return capacity.Bounds{Capacity: r.Capacity, ForPieces: r.ForPieces, MinFree: r.MinFree, MinFreePart: r.MinFreePart}
}

// Moves bounds the copies between levels. Zero is a default of [moves.Config].
type Moves struct {
	Workers   int
	Bandwidth int64         // bytes per second
	Waiting   time.Duration // that what waits may take
	Shutdown  time.Duration // how long Close may take to copy what volatile roots hold; 0: it copies nothing
}

// Quota bounds what the entries of one tenant may take.
type Quota = capacity.Quota

// Config makes a store. Roots is required, each with a Path and a Capacity; what else is zero has a default.
type Config struct {
	Roots    []RootConfig
	Strict   bool // a piece's bytes and name are durable before it is resident; else a power failure may lose them
	Policies Policies
	FS       staging.FS // of roots without one; nil: the operating system's below each root
	Log      *slog.Logger
	Seed     uint64
	Now      func() time.Time
	HostID   string // marks this host's temporaries, 1 to 32 of [a-z0-9]: made from the machine's id
	Dry      bool   // see [Open]
	// Making is called when Open is about to make a root's directory, by several goroutines; its error refuses that. Optional.
	Making func() error

	Compression codec.Modes // of RootConfig.Compressed
	Expiries    []Expiry    // of entries by their model, the first that fits; none: they do not expire
	Quotas      []Quota     // the first that fits a tenant is the tenant's

	IOTimeout   time.Duration // of an operation on files; its root is taken out then. 0: 30 s, negative: none
	UpkeepEvery time.Duration // between looks at each root; the unit of the pauses between probes: 1 s

	Moves Moves // between levels

	QuarantineFiles int           // most damaged files kept per root; 0: 64, negative: none
	ScanWorkers     int           // readers of the scan at Open, per root: 8
	ScanWait        time.Duration // how long Open waits for scans, which continue afterwards: 1 s; negative: not at all

	lender Lender // of the root that has one, or nil
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

// complete checks the settings and fills in the defaults.
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
			return fmt.Errorf("%w: entries of %q are to expire after %s", ErrConfig, e.Model, e.TTL)
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
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if !pieceformat.ValidHostID(c.HostID) {
		return fmt.Errorf("%w: host id %q, want 1 to 32 of [a-z0-9]", ErrConfig, c.HostID)
	}
	return nil
}

// evicts is the policy of a root, or nil for the built-in one. What leases end soon needs no other.
func (c *Config) evicts(r *RootConfig) *policy.Handle {
	switch {
	case r.Lender != nil:
		return nil
	case r.Evict != nil:
		return r.Evict
	}
	return c.Policies.Evict
}

// SlotsFor is the most entries that so many bytes are expected to hold.
func SlotsFor(capacity int64) uint32 {
	return uint32(max(min(capacity/smallestEntry+1, defaultSlots), min(capacity/usualEntry, 1<<30)))
}

// machineID is the same after a restart of the host and differs between machines.
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

// Policies say who decides. Evict is bound to roots, the other roles to namespaces: a namespace gets the policy of the
// first rule with the role that matches it, and the role's own field where none does. The handles are borrowed until
// Open returns; a nil handle is the built-in policy.
type Policies struct {
	Evict, Admit, Place, Layout *policy.Handle
	Rules                       []catalog.Rule
	Shadows                     []Shadow
}

// Shadow is an evict policy that decides nothing: it receives all requests and evicts from an imaginary cache.
type Shadow struct {
	Policy   *policy.Handle // borrowed
	Capacity int64          // of the imaginary cache; 0: of the roots together
}

// Capacity is that of all roots.
func (c *Config) Capacity() (all int64) {
	for i := range c.Roots {
		if c.Roots[i].Lender == nil {
			all += c.Roots[i].Capacity
		}
	}
	return all
}

// wish is how a shadow runs next to these roots.
func (c *Config) wish(h Shadow) shadow.Wish {
	capacity := cmp.Or(h.Capacity, c.Capacity())
	return shadow.Wish{Policy: h.Policy, Options: policy.EvictOptions{
		MaxSlots: SlotsFor(capacity), Capacity: uint64(capacity), Seed: c.Seed, Config: h.Policy.Config,
	}}
}

// Expiry is how long entries of some models are served.
type Expiry struct {
	Model string // a pattern as of [path.Match], for the namespace's model
	TTL   time.Duration
}

// ttl is the time to live of a namespace's entries, 0 for none: the first pattern that fits counts.
func (c *Config) ttl(text string) time.Duration {
	for _, e := range c.Expiries {
		if fits, _ := path.Match(e.Model, kv.Field(text, "model")); fits {
			return e.TTL
		}
	}
	return 0
}

// Lender is who stands for the hosts that lend.
type Lender interface {
	// Blame says that the file of a piece could not be read, or is not what it should be. Its entry is dropped.
	Blame(name string, cause error)
	// Copies is how many other hosts are known to have an entry. It costs no message.
	Copies(fp uint64) int
	// Takes says whether a host is there that may take what this one evicts.
	Takes() bool
	// Offer asks it to take an entry, and waits until it has or will not: [moves.ErrRefused].
	Offer(ctx context.Context, o *Offer) error
}

// Scheduler is for tests. It replaces the clock and the timers of a shared root, so that what its hosts do to each
// other repeats from a seed: a host makes a step when [Store.Maintain] says so, one host at a time.
type Scheduler struct {
	Now func() time.Duration
	// Wait is called where the host would wait for others. It lets each of them make a step, and the caller by step.
	Wait func(step func())
}

// Offer is an entry that another host is to take.
type Offer struct {
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
	Tenant    uint32
	Ranks     uint64
	Lease     *Lease // of it alone, which ends when Offer returns
}
