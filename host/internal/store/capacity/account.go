package capacity

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
)

// Part is a part of the bytes in an account.
type Part uint8

// Parts of an account.
const (
	Entries    Part = iota // pieces, including reserved pieces that are not yet written
	Quarantine             // damaged files that are kept
	Orphans                // files that could not be unlinked
	Unscanned              // upper bound of the bytes in files that a scan has not yet seen
	parts
)

type Config struct {
	Dir string // directory of the root, for errors
	Bounds
	Now func() time.Time
}

// Bounds limit the bytes of a root.
type Bounds struct {
	Capacity    int64
	ForPieces   bool    // directories do not count against the capacity
	MinFree     int64   // bytes to leave free on the file system
	MinFreePart float64 // the same as a part of the file system; the larger of the two applies
}

// Account tracks the bytes of one root. It is safe for concurrent use. Its lock is taken after the root's.
//
// The capacity is the limit that the owner of the root sets. The file system may have less: a part of it is reserved for others
// (MinFree), or it may be full before the capacity is reached. Then the root uses the space that it can get, and more when
// there is room again.
type Account struct {
	dir string
	now func() time.Time

	mu       sync.Mutex
	bounds   Bounds
	used     int64 // sum of part
	part     [parts]int64
	leaving  [parts]int64 // bytes of files that are being unlinked, included in part
	begun    int64        // sum of all bytes that were ever added to leaving
	tenants  []int64      // part[Entries] by tenant number
	free     int64        // most that the root may use by the last measurement
	measured time.Time
	dirs     int64     // bytes of directories
	ceiling  int64     // bytes in use when the file system was full
	full     bool      // a ceiling applies
	until    time.Time // end of the ceiling, or of the last one
	pause    time.Duration
	passing  bool // the ceiling is the first since the file system had room, and may be temporary
}

// Figures are the values of an account at one moment. Used includes reserved bytes. Limit is the most that the root may use
// now. The four parts add up to Used.
type Figures struct {
	Capacity, Used, Limit                   int64
	Entries, Quarantine, Orphans, Unscanned int64
	Ceiling                                 time.Duration // time until the ceiling of a full file system is lifted; 0 if there is none
}

// New returns an empty account.
func New(cfg Config) *Account {
	return &Account{dir: cfg.Dir, now: cfg.Now, bounds: cfg.Bounds}
}

// SetBounds changes the bounds. Bytes in use stay in the account. If they exceed the new limit, nothing can be reserved until
// enough has been evicted.
func (a *Account) SetBounds(b Bounds) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bounds, a.measured = b, time.Time{} // the last measurement applied the old MinFree
}

func (a *Account) Figures() Figures {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := Figures{Capacity: a.bounds.Capacity, Used: a.used, Limit: a.limit(), Entries: a.part[Entries], Quarantine: a.part[Quarantine],
		Orphans: a.part[Orphans], Unscanned: a.part[Unscanned]}
	if a.full {
		f.Ceiling = max(1, a.until.Sub(a.now()))
	}
	return f
}

// Excess returns the bytes in use beyond a part of the limit. It is negative if fewer are in use.
func (a *Account) Excess(part float64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used - int64(part*float64(a.limit()))
}

// Free returns the unused part of the capacity.
func (a *Account) Free() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return float64(a.limit()-a.used) / float64(a.bounds.Capacity)
}

// Taken returns the used part of the limit.
func (a *Account) Taken() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return min(1, float64(a.used)/float64(max(1, a.limit())))
}

// Lasting returns the limit. It leaves out the ceiling of a file system that was full for the first time, because that may have
// room again in a moment.
func (a *Account) Lasting() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.limitUnder(a.full && !a.passing)
}

func (a *Account) limit() int64 { return a.limitUnder(a.full) }

func (a *Account) limitUnder(ceiling bool) int64 {
	limit := a.bounds.Capacity
	if !a.bounds.ForPieces {
		limit = max(0, limit-max(0, a.dirs-max(leastDirs, limit/dirsShare)))
	}
	if !a.measured.IsZero() {
		limit = min(limit, a.free)
	}
	if ceiling {
		limit = min(limit, a.ceiling)
	}
	return limit
}

// Directories may take this part of the capacity, or at least leastDirs bytes, in addition to the pieces. Beyond that, they
// reduce the limit.
const (
	dirsShare = 256
	leastDirs = 1 << 20
)

// Directories adds to the bytes of directories. The change may be negative.
func (a *Account) Directories(more int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dirs = max(0, a.dirs+more)
}

// DirectoriesGo reports whether empty directories should be removed, and created again for the next piece. This is so if the
// directories exceed their part of the capacity, and in small roots, where that part is less than leastDirs.
func (a *Account) DirectoriesGo() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	part := a.bounds.Capacity / dirsShare
	return !a.bounds.ForPieces && (part < leastDirs || a.dirs > part)
}

// Commit changes the bytes of a tenant's entries, after a scan has found a piece or a piece took a different size than was
// reserved.
func (a *Account) Commit(tenant uint16, by int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bill(tenant, by)
	a.check()
}

// Release removes bytes from a tenant. Their file must be unlinked.
func (a *Account) Release(tenant uint16, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bill(tenant, -bytes)
	a.check()
}

// Add adds bytes of files that belong to no entry.
func (a *Account) Add(to Part, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.add(to, bytes)
	a.check()
}

// Remove removes bytes of files that belong to no entry. It removes at most the bytes of the part, and returns the number
// removed.
func (a *Account) Remove(from Part, bytes int64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	bytes = min(bytes, a.part[from])
	a.add(from, -bytes)
	a.check()
	return bytes
}

// Check compares the account with figures that the owner has counted: the bytes of entries by tenant, those of entries that are
// leaving, and the bytes of the quarantine.
func (a *Account) Check(tenants []int64, leaving, quarantine int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var entries int64
	for tenant := range max(len(tenants), len(a.tenants)) {
		var counted int64
		if tenant < len(tenants) {
			counted = tenants[tenant]
		}
		if entries += counted; counted != a.ownedBy(uint16(tenant)) {
			return fmt.Errorf("entries of tenant %d take %d bytes, the account says %d", tenant, counted,
				a.ownedBy(uint16(tenant)))
		}
	}
	if leaving != a.leaving[Entries] {
		return fmt.Errorf("entries of %d bytes are leaving, the account says %d", leaving, a.leaving[Entries])
	}
	if entries+quarantine+a.part[Orphans]+a.part[Unscanned] != a.used {
		return fmt.Errorf("entries %d, quarantine %d, orphans %d and unscanned %d make not the %d bytes used",
			entries, quarantine, a.part[Orphans], a.part[Unscanned], a.used)
	}
	return nil
}

// Leave records that files with the given bytes of a part are about to be unlinked. With negative bytes, it records that this has
// ended.
func (a *Account) Leave(from Part, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leaving[from] += bytes
	a.begun += max(0, bytes)
	a.check()
}

// Reset empties the account, for a root that is opened again.
func (a *Account) Reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used, a.part, a.tenants, a.dirs = 0, [parts]int64{}, nil, 0
}

// The following methods are called with a.mu held.

func (a *Account) add(to Part, bytes int64) {
	a.part[to] += bytes
	a.used += bytes
}

func (a *Account) bill(tenant uint16, by int64) {
	a.add(Entries, by)
	for int(tenant) >= len(a.tenants) {
		a.tenants = append(a.tenants, 0)
	}
	a.tenants[tenant] += by
}

func (a *Account) ownedBy(tenant uint16) int64 {
	if int(tenant) >= len(a.tenants) {
		return 0
	}
	return a.tenants[tenant]
}

// check panics if the account is inconsistent. It does so only in builds with the tag invariants.
func (a *Account) check() {
	if !invariants {
		return
	}
	sum, owned := int64(0), int64(0)
	for p, n := range a.part {
		if sum += n; n < 0 || a.leaving[p] < 0 {
			panic(fmt.Sprintf("%s: part %d of the account is %d bytes, of which %d are leaving", a.dir, p, n, a.leaving[p]))
		}
	}
	for tenant, n := range a.tenants {
		if owned += n; n < 0 {
			panic(fmt.Sprintf("%s: tenant %d has %d bytes", a.dir, tenant, n))
		}
	}
	if sum != a.used || owned != a.part[Entries] {
		panic(fmt.Sprintf("%s: %d bytes are in use, the parts %v have %d, tenants %d", a.dir, a.used, a.part, sum, owned))
	}
}

// The following methods track the space on the file system.

// freshness is the maximum age of a measurement that a put relies on. A measurement does not show the writes of others since
// then. The root's own writes are in the account.
const freshness = 100 * time.Millisecond

// Floor reports whether bytes must be left free, so that the file system must be measured.
func (a *Account) Floor() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.floor()
}

func (a *Account) floor() bool { return a.bounds.MinFree > 0 || a.bounds.MinFreePart > 0 }

// Stale reports whether a new measurement is due before a put.
func (a *Account) Stale() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.floor() && a.now().Sub(a.measured) > freshness
}

// Settled returns a value to pass to Measured. It must be called before the measurement. Unwritten bytes are assumed to have no
// space on the file system yet, since it does not report that.
func (a *Account) Settled(unwritten int64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	settled := a.used - unwritten + a.begun
	for _, n := range a.leaving {
		settled -= n
	}
	return settled
}

// Measured records a measurement of the file system: its size and the available bytes. Of the root's bytes, it counts those that
// were on the file system throughout. Any others may be among the available ones.
func (a *Account) Measured(total, available, settled int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free, a.measured = max(0, settled-a.begun+available-a.keep(total)), a.now()
}

// Owns records the size of a file system that holds only this root.
func (a *Account) Owns(total int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free, a.measured = max(0, total-a.keep(total)), a.now()
}

func (a *Account) keep(total int64) int64 {
	return max(a.bounds.MinFree, int64(math.Ceil(a.bounds.MinFreePart*float64(total))))
}

// Full records that the file system was full although the account had room. For a pause, the bytes written so far are the
// limit, or the bytes of one entry if that is more, in case others have freed space. The first pause has the length least. If
// the file system is full again before more could be written, the next pause is twice as long, but not longer than most. After
// more than the time most with room, or once more could be written, the first length applies again.
func (a *Account) Full(entry, unwritten int64, least, most time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	written := max(entry, a.used-unwritten)
	if written > a.ceiling || a.now().Sub(a.until) > most {
		a.pause = 0
	}
	if !a.full || a.pause == 0 {
		a.passing = a.pause == 0
		a.pause = min(max(least, 2*a.pause), most)
	}
	a.full, a.ceiling, a.until = true, written, a.now().Add(a.pause)
}

// Lift ends a ceiling early: a file system that returns may have room.
func (a *Account) Lift() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.full = false
}

// Retry ends a ceiling after its time, and reports whether it did.
func (a *Account) Retry() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	over := a.full && a.now().After(a.until)
	if over {
		a.full = false
	}
	return over
}

// ErrNoSpace means that a reservation does not fit.
var ErrNoSpace = errors.New("store: no space")
