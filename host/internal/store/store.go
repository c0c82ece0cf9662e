package store

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Store holds the chunks of one host. It is safe for concurrent use.
type Store struct {
	cfg      Config
	live     atomic.Pointer[Config] // cfg with the changes of Reload
	log      *slog.Logger
	catalog  *catalog.Catalog
	changes  *entries.ChangeLog
	requests *touchRecord
	seq      files.Sequence
	count    storeCounters

	hierarchy
	copying
	deciding
	ownWork

	stripes    [1024]*semaphore.Weighted // by fingerprint of the key; serializes the puts of a key over all roots
	discarding *staging.Turns            // limits discards to half of the processors, since they are not urgent
}

// copying is the state of copies between levels.
type copying struct {
	copies *entries.Copies // nil if there is one root
	mover  *moves.Mover    // nil if there is one level
	loads  moves.Loads     // running loads, which copies wait for
}

// deciding is the state of policy calls and policy changes.
type deciding struct {
	swapping   *semaphore.Weighted // held while policies change
	shadows    shadow.Set
	candidates sync.Pool    // pool of *candidate
	factsAt    atomic.Int64 // time of the last facts for the place policy
	admitFault sync.Once
}

// ownWork is the background work of the store.
type ownWork struct {
	run      context.Context // done when the store closes
	stop     context.CancelFunc
	work     sync.WaitGroup
	scanDone chan struct{}
	closed   atomic.Bool
}

// storeCounters are counters of the whole store.
type storeCounters struct {
	refused, resident, lookups, keys, hits atomic.Uint64
}

type candidate struct {
	ask    [1]abi.Candidate
	answer [1]bool
}

// hierarchy holds the roots of a store and their levels. The bytes of other hosts are in one root, which is the last one and
// the only root of the farthest level.
type hierarchy struct {
	roots   []*root  // as configured
	levels  []*level // nearest first
	beyond  *level   // level of the other hosts' root; nil if no host lends
	lent    []*level // own levels from which other hosts borrow; remote levels are excluded, because other hosts reach them just as fast
	offered *level   // last own level, where hosts offer each other evicted entries; nil if there are no offers
}

// level is the set of roots with the same distance. An entry may have a copy in each level. It implements [moves.Level].
type level struct {
	store    *Store
	number   int      // number in the configuration
	places   []uint32 // positions of the roots in the configuration
	roots    []*root
	count    moves.Counters // moves to this level
	said     saying         // last log message about shed copies; used only by the upkeep of the first root
	nearing  atomic.Int64   // bytes of copies that running loads are making
	early    earlies        // entries that went to a farther level because memory was still being allocated
	turnover turnover       // maintained in the offered level
	hits     atomic.Uint64  // keys that lookups were granted in this level
	loaded   atomic.Uint64  // bytes of pieces that loads opened in this level
}

// saying is the state of the log message about shed copies.
type saying struct {
	next time.Time
	shed uint64
}

// turnover measures the time in which an offered level replaces its content.
type turnover struct {
	mu sync.Mutex
	policy.Turnover
}

// root combines its entries and its files. It is plain code between its medium and its [owner].
type root struct {
	entries.Set
	*files.Dir
	store  *Store
	cfg    RootConfig
	owner  owner
	budget *capacity.Budget // daily write budget

	kept      *keptDir // the store's own files
	recovery  *recovery
	directory *health.Directory
	meter     meter

	level      *level
	origin     moves.Origin   // source of copies to other levels
	evicting   *staging.Turns // held by the one reservation that may evict; nil if other hosts write too, since an elected one evicts
	leaving    moves.Leaving  // entries that leave for the next level
	upkeepWake chan struct{}

	unavailable atomic.Bool   // the root could not be opened: see openLate
	scanned     chan struct{} // closed when all entries are known
	entered     atomic.Int64  // number of pieces entered
	some        chan struct{} // closed when there are enough pieces to measure the speed of reads

	suspects marks        // entries with files that gave no answer
	twice    atomic.Int64 // bytes that may be counted both as reserved and as orphans while puts end
}

// meter measures the transfers of the root's files, and the gain of compression. gain is nil if compression does not depend on
// it.
type meter struct {
	staging.Meter
	gain *codec.Root
}

// marks is a list of entries. Its lock is taken after the root's.
type marks struct {
	mu   sync.Mutex
	list []entries.Mark
}

// at returns the level with a number.
func (h *hierarchy) at(number int) *level {
	return h.levels[slices.IndexFunc(h.levels, func(l *level) bool { return l.number == number })]
}

// own returns the levels that take stores, nearest first.
func (h *hierarchy) own() []*level {
	if h.beyond == nil {
		return h.levels
	}
	return h.levels[:len(h.levels)-1]
}

// ours returns the roots of the own levels.
func (h *hierarchy) ours() []*root {
	if h.beyond == nil {
		return h.roots
	}
	return h.roots[:len(h.roots)-len(h.beyond.roots)]
}

func (m *marks) add(more ...entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = append(m.list, more...)
}

func (m *marks) take() (list []entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	list, m.list = m.list, nil
	return list
}

// ScratchName returns the path of a file that a test may create in a root, given the root's path. It is a temporary of this
// host, so it is removed when a host opens the root after a kill. Its bytes do not count against the root's capacity.
func (s *Store) ScratchName(root, what string) string {
	return s.seq.TempName(root + "/" + pieceformat.MetaDir + "/" + what)
}

// EndRequest tells the evict policies that a request has ended, with the hints of its engine.
func (s *Store) EndRequest(request uint32, hints abi.Hints) {
	if s.closed.Load() || request == 0 {
		return
	}
	s.requests.End(request)
	now := s.seq.Clock()
	s.shadows.Tell(shadow.Step{Op: shadow.End, Request: request, Tenant: abi.None, Time: now, Hints: hints})
	for _, r := range s.roots {
		r.Evictor.EndRequest(request, hints, now)
	}
}

// admissionFault logs the first failure of the admit policy. After a failure everything is admitted.
func (s *Store) admissionFault(err error) {
	s.admitFault.Do(func() { s.log.Error("admit policy failed; everything is admitted", "error", err) })
}

// keptChanges is the maximum number of changes that a reader may be behind. They take about 8 MB once there is a reader.
const keptChanges = 1 << 16

// Changes returns the log of entries that become resident and of those that leave. Entries of a root that is out of service
// count as resident. An entry with copies in several roots is recorded once. It may be recorded twice if it is stored while a
// root with a copy is out of service, or if its root is shared.
func (s *Store) Changes() *entries.ChangeLog { return s.changes }

// Snapshot calls yield with the resident entries, as changes without a number, until yield returns false. Changes during the
// call may be missing. They are in the log: call [entries.ChangeLog.Start] before the snapshot.
func (s *Store) Snapshot(yield func([]entries.Change) bool) { snapshot(s.ours(), yield) }

func snapshot(roots []*root, yield func([]entries.Change) bool) bool {
	batch := make([]entries.Change, 0, entries.SnapshotStep)
	for _, r := range roots {
		for from, more := uint32(0), true; more; from += entries.SnapshotStep {
			if batch, more = r.Snapshot(from, batch[:0]); len(batch) > 0 && !yield(batch) {
				return false
			}
		}
	}
	return true
}

// Namespace opens a namespace. It returns the same pointer for the same namespace. Before it returns, the text and the plans
// are durable in every root, because without them a restarted host cannot read the pieces.
func (s *Store) Namespace(ctx context.Context, n *kv.Namespace) (*catalog.Namespace, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if s.closed.Load() {
		return nil, ErrClosed
	}
	ns, err := s.catalog.Open(ctx, n)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return ns, nil
}
