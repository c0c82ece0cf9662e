package capacity

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
)

// Part is a share of the bytes in an account.
type Part uint8

// The parts.
const (
	Entries    Part = iota // pieces, also those that are reserved and not yet written
	Quarantine             // damaged files that are kept
	Orphans                // files that could not be unlinked
	Unscanned              // an upper bound of what files take that a scan has not seen
	parts
)

type Config struct {
	Dir string // of the root, for errors
	Bounds
	Now func() time.Time
}

// Bounds are what a root may take.
type Bounds struct {
	Capacity    int64
	ForPieces   bool    // the capacity is for pieces alone: directories come on top
	MinFree     int64   // bytes that are left free on the file system
	MinFreePart float64 // the same as a part of the file system; the larger of the two holds
}

// Account is one root's bytes. It is safe for concurrent use; its lock is taken after the root's.
//
// A root's capacity is what its owner allows. The file system may have less: a part of it is to be left to others
// (MinFree), or it is full before the capacity is reached. Then the root takes what it can get, and more when there is
// room again.
type Account struct {
	dir string
	now func() time.Time

	mu       sync.Mutex
	bounds   Bounds
	used     int64 // the sum of part
	part     [parts]int64
	tenants  []int64 // of part[Entries], by the tenants' numbers
	free     int64   // what the root may take by the last measurement
	measured time.Time
	dirs     int64     // bytes of directories
	ceiling  int64     // what was in use when the file system was full
	full     bool      // there is a ceiling
	until    time.Time // when it ends, or the last one has ended
	pause    time.Duration
	passing  bool // it is the first ceiling since there was room, and may pass by itself
}

// Figures are an account at one moment: what the owner of the root allows, the bytes in use, reserved ones included, what the
// root may take now, and the parts of what is in use.
type Figures struct {
	Capacity, Used, Limit                   int64
	Entries, Quarantine, Orphans, Unscanned int64
	Ceiling                                 time.Duration // until it ends that the file system was full; 0: there is none
}

// New makes an account of nothing.
func New(cfg Config) *Account {
	return &Account{dir: cfg.Dir, now: cfg.Now, bounds: cfg.Bounds}
}

// SetBounds changes what the root may take. What is in use stays in the account: until it is evicted, the root is over its
// limit, and nothing is reserved.
func (a *Account) SetBounds(b Bounds) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bounds, a.measured = b, time.Time{} // the last measurement was for another floor
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

// Excess is how much more than a part of the limit is in use; negative when less is.
func (a *Account) Excess(part float64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used - int64(part*float64(a.limit()))
}

// Free is the part of the capacity that is not in use.
func (a *Account) Free() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return float64(a.limit()-a.used) / float64(a.bounds.Capacity)
}

// Taken is the part of the limit that is in use.
func (a *Account) Taken() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return min(1, float64(a.used)/float64(max(1, a.limit())))
}

// Lasting is the limit, but for that of a file system that was full for the first time: it may have room again in a moment.
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

// Directories may take a part of the capacity, or so many bytes, on top of it: what they take beyond is not there for pieces.
const (
	dirsShare = 256
	leastDirs = 1 << 20
)

// Directories says that directories take so many bytes more.
func (a *Account) Directories(more int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dirs = max(0, a.dirs+more)
}

// DirectoriesGo says whether empty directories are to be removed, and made again for the next piece: where what they take is
// not there for pieces, and in roots of which the bytes that are tolerated are more than that part.
func (a *Account) DirectoriesGo() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	part := a.bounds.Capacity / dirsShare
	return !a.bounds.ForPieces && (part < leastDirs || a.dirs > part)
}

// Commit changes what a tenant's entries take: a piece took more than was reserved, or less, or a scan found one.
func (a *Account) Commit(tenant uint16, by int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bill(tenant, by)
	a.check()
}

// Release takes a tenant's bytes out of the account: no file has them any more.
func (a *Account) Release(tenant uint16, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bill(tenant, -bytes)
	a.check()
}

// Add books bytes of files that are no entry's.
func (a *Account) Add(to Part, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.add(to, bytes)
	a.check()
}

// Remove takes bytes that are no entry's out of the account, at most what the part has, and returns how many.
func (a *Account) Remove(from Part, bytes int64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	bytes = min(bytes, a.part[from])
	a.add(from, -bytes)
	a.check()
	return bytes
}

// Check compares the account with what its owner counts: the bytes of entries by tenant, and of the quarantine.
func (a *Account) Check(tenants []int64, quarantine int64) error {
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
	if entries+quarantine+a.part[Orphans]+a.part[Unscanned] != a.used {
		return fmt.Errorf("entries %d, quarantine %d, orphans %d and unscanned %d make not the %d bytes used",
			entries, quarantine, a.part[Orphans], a.part[Unscanned], a.used)
	}
	return nil
}

// Reset makes it an account of nothing again, as of a root that is opened anew.
func (a *Account) Reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used, a.part, a.tenants, a.dirs = 0, [parts]int64{}, nil, 0
}

// The rest is called with a.mu held.

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

// check panics, in a build with the tag invariants, when the account contradicts itself.
func (a *Account) check() {
	if !invariants {
		return
	}
	sum, owned := int64(0), int64(0)
	for p, n := range a.part {
		if sum += n; n < 0 {
			panic(fmt.Sprintf("%s: part %d of the account is %d bytes", a.dir, p, n))
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

// What the file system leaves.

// freshness is how old a measurement may be for a put to go by it. It does not show what others wrote since; the root's
// own writes are in the account.
const freshness = 100 * time.Millisecond

// Floor says whether bytes are to be left free, so that the file system must be measured.
func (a *Account) Floor() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.floor()
}

func (a *Account) floor() bool { return a.bounds.MinFree > 0 || a.bounds.MinFreePart > 0 }

// Stale says whether a measurement is due before a put.
func (a *Account) Stale() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.floor() && a.now().Sub(a.measured) > freshness
}

// Measured takes a measurement: the file system has total bytes, and so many available. Of what is in use, unwritten
// bytes count as if none were on it: the file system does not tell.
func (a *Account) Measured(total, available, unwritten int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free, a.measured = max(0, a.used-unwritten+available-a.keep(total)), a.now()
}

// Owns takes a measurement of a file system that holds nothing but the root: it has total bytes.
func (a *Account) Owns(total int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free, a.measured = max(0, total-a.keep(total)), a.now()
}

func (a *Account) keep(total int64) int64 {
	return max(a.bounds.MinFree, int64(math.Ceil(a.bounds.MinFreePart*float64(total))))
}

// Full notes that the file system was full although the account had room. What is written now is the limit for a while;
// one entry may be tried, in case others have freed something. The while is the least at first, and twice as long, up to the
// most, each time that the file system is full again before more was written, or had room for that long.
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

// Lift ends a ceiling before its time is over: a file system that comes back may have room.
func (a *Account) Lift() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.full = false
}

// Retry ends a ceiling after its time. It says whether there was one.
func (a *Account) Retry() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	over := a.full && a.now().After(a.until)
	if over {
		a.full = false
	}
	return over
}

// ErrNoSpace says that a reservation does not fit.
var ErrNoSpace = errors.New("store: no space")
