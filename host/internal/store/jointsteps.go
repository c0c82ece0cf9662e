package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// joint is the [owner] of a root that several hosts share. One of them evicts for all, which lends the others
// credit for what they write and removes what they report. An entry gets bytes rank by rank, because other hosts may write
// the other ranks, and nothing is granted while this host may have missed a removal.
//
// A joint owner connects the entries and files of its root with a member of the protocol in package shared, which says why the
// protocol holds. A piece is written against credit. Temporaries are in the directory of the member. No host takes a name away
// because its file is damaged or unwanted: it proposes that (propose, reportDamaged), and the evictor removes the file when no
// host has it leased.
//
// The lock of the entries guards the counts. No file is touched and no member is asked to write under it.
type joint struct {
	root  *root
	kept  *keptDir
	scans *recovery
	began time.Time

	newMember func() (member, error)
	walk      func(ctx context.Context, c *scan) error // looks at every file
	confirms  bool                                     // walk drops what is not there, so that entries outlive a membership
	audits    *audits                                  // of a bucket
	member    member
	ended     chan struct{} // closed when the steps have ended
	stop      context.CancelFunc
	gate      []io.Closer // held until this host has joined the others

	busy    atomic.Bool   // the first scan is under way
	ticket  uint64        // of the last scan that was begun: Scan's, and then steps'
	scanned atomic.Uint64 // likewise, for its judge

	set *entries.Set // its lock guards the rest

	firstScan  *scan // while it runs: entries are told to the evict policy when all are there
	pending    map[shared.ID]*pendingEviction
	awaited    map[met]int64 // bytes of files that others published while this host writes their pieces
	met        []sight       // what scans have met of entries that this host writes
	overlooked int64         // bytes of files that the last scan could make nothing of
	// bytes of the account that are covered by credit: of pieces being written, and of temporaries that would not go
	inFlight int64
	waiting  int // puts that wait for credit
	// entries that were removed since the scan began that is under way; nil: there is none
	removed map[shared.ID]bool
}

// member is this host's part in a protocol of the hosts that share a root: see [shared.Member], and [bucket.Member].
type member interface {
	Step() error
	Leave() error
	Wake()
	Wakeups() <-chan struct{}
	Fresh() bool
	Ticket() uint64
	Scanned(ticket uint64)
	Stats() shared.Stats

	Take(bytes int64) (shared.Credit, bool)
	Holds(credit shared.Credit) bool
	Give(credit shared.Credit)
	More() <-chan struct{}

	Temp(name string, credit shared.Credit) (string, error)
	Publish(temp, target string, r shared.Record, credit *shared.Credit) error
	Touch(fingerprint uint64)
	ReportDamaged(r shared.Record)
}

// met is a file of an entry, by its path below the root.
type met struct {
	shared.ID
	rel string
}

// pendingEviction is an entry that is in the journal, or that this host wants to have there: it is neither granted nor
// stored.
type pendingEviction struct {
	entries.Eviction
	entry    bool            // Eviction is of an entry of the index, which is leaving
	batch    bool            // it is in the journal
	orphaned int64           // bytes in the account besides the entry's
	learned  map[string]bool // files that were met since; their bytes are in orphaned, or are the entry's
}

func (d *pendingEviction) learn(rel string) {
	if d.learned == nil {
		d.learned = map[string]bool{}
	}
	d.learned[rel] = true
}

// files are those of the entry that is leaving.
func (d *pendingEviction) files() []string {
	if !d.entry {
		return nil
	}
	return filesOf(d.Class, &d.Key, d.Pieces, d.Names)
}

func (d *pendingEviction) has(rel string) bool { return slices.Contains(d.files(), rel) }

// joinTimeout is how long a host waits for others that are joining.
const joinTimeout = 5 * time.Second

// unique is a number that no other host has, either.
func unique() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	return binary.LittleEndian.Uint64(b[:])
}

func (r *joint) directoryMember() (member, error) {
	return shared.New(shared.Config{
		Dir: r.kept.Path, Host: r.root.store.cfg.HostID, Capacity: r.root.cfg.Capacity, Lapse: r.root.cfg.Lapse,
		FS: r.kept.FS, Log: r.kept.Log, Unique: unique, Now: r.clock,
	}, backend{r})
}

// join joins the others, and makes steps until [joint.leave]. What is there a scan finds, while sessions use the root:
// scans judges what it meets by [judge].
func (r *joint) join(scans *recovery) error {
	r.scans, scans.overlooked = scans, &r.overlooked
	if err := r.kept.removeCheckpoint(); err != nil { // of a run that had the root to itself
		return err
	}
	m, err := r.newMember()
	if err != nil {
		return err
	}
	r.set.Lock()
	r.set.BeginScan()
	r.member, r.firstScan, r.ended, r.set.Touched = m, r.scans.newScan(false), make(chan struct{}), m.Touch
	r.pending, r.awaited, r.met = map[shared.ID]*pendingEviction{}, map[met]int64{}, nil
	r.overlooked, r.inFlight, r.ticket = 0, 0, 0
	r.set.Unlock()
	r.busy.Store(true)
	err = r.member.Step()
	r.unlockJoin()
	if errors.Is(err, shared.ErrLinks) {
		return fmt.Errorf("store: root %s cannot be shared: %w", r.kept.Path, err)
	}
	run, stop := context.WithCancel(context.Background())
	r.stop = stop
	if r.root.cfg.Scheduler == nil {
		go r.work(run)
	} else {
		close(r.ended)
	}
	return nil
}

// scan waits until this host is admitted, and looks at what is there. Until all was seen, the evict policy is told
// nothing.
func (r *joint) scan(ctx context.Context) error {
	if err := r.admission(ctx); err != nil {
		return err
	}
	r.ticket = r.member.Ticket()
	if err := r.rescan(ctx); err != nil {
		return err
	}
	if !r.kept.Health.Serves() {
		return r.kept.Health.OutError()
	}
	first := r.firstScan
	first.order()
	first.End(ctx, func(booked int64) { // it has learned of other hosts' pieces until now
		r.set.Account.Add(capacity.Orphans, first.Orphaned()-booked)
		r.overlooked += first.Orphaned()
		r.firstScan = nil
	})
	r.member.Scanned(r.ticket)
	r.busy.Store(false)
	return nil
}

// admission waits for an evictor to take this host in.
func (r *joint) admission(ctx context.Context) error {
	tick := time.NewTicker(r.root.cfg.Poll / 8)
	defer tick.Stop()
	for r.member.Ticket() == 0 {
		if d := r.root.cfg.Scheduler; d != nil {
			d.Wait(func() { r.step(ctx) })
			continue
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("store: root %s: no evictor has admitted this host: %w", r.kept.Path, ctx.Err())
		case <-tick.C:
			r.member.Wake()
		}
	}
	return nil
}

// step makes one step under a [Scheduler], with the scan if one is due.
func (r *joint) step(ctx context.Context) {
	r.lookAgain()
	_ = r.member.Step()
	if t := r.member.Ticket(); t != 0 && !r.busy.Load() && t != r.ticket {
		r.ticket = 1
		if r.rescan(ctx) == nil {
			r.ticket = t
			r.member.Scanned(t)
		}
	}
	if r.audits != nil {
		r.audits.pass(ctx, 0)
	}
}

func (r *joint) clock() time.Duration {
	if d := r.root.cfg.Scheduler; d != nil {
		return d.Now()
	}
	return r.root.store.cfg.Now().Sub(r.began)
}

// rescan looks at every file again, as a host does that was given up and has joined again.
func (r *joint) rescan(ctx context.Context) error {
	r.scanned.Store(r.member.Ticket())
	r.set.Lock()
	r.set.Account.Remove(capacity.Orphans, r.overlooked)
	r.overlooked, r.scans.missed, r.removed = 0, nil, map[shared.ID]bool{}
	r.set.Unlock()
	found := r.scans.newScan(false)
	err := r.walk(ctx, found)
	r.set.Lock()
	r.removed = nil
	r.set.Unlock()
	r.overlook(found.Orphaned())
	r.scans.miss(found)
	return err
}

// leave ends the host's part. Nothing else uses the root any more.
func (r *joint) leave() {
	defer r.unlockJoin()
	if r.stop == nil {
		return
	}
	r.silence()
	if err := r.member.Leave(); err != nil {
		r.kept.Log.Warn("shared root left without notice; the other hosts will give this one up", "error", err)
	}
	r.stop = nil
}

// silence ends the steps. To the other hosts this one looks as if it had been killed.
func (r *joint) silence() {
	r.stop()
	<-r.ended
}

// work does the member's work, and audits, until the context is done.
func (r *joint) work(ctx context.Context) {
	defer close(r.ended)
	var audits sync.WaitGroup
	defer audits.Wait()
	if r.audits != nil {
		audits.Go(func() { r.audits.run(ctx) })
	}
	r.steps(ctx)
}

// steps makes the member's steps.
func (r *joint) steps(ctx context.Context) {
	var scans chan error
	last := fmt.Sprint(error(nil))
	tick := time.NewTicker(r.root.cfg.Poll)
	defer tick.Stop()
	for {
		r.lookAgain()
		err := r.member.Step()
		if text := fmt.Sprint(err); text != last {
			last = text
			r.kept.Log.Log(ctx, stepLevel(err), "step among the hosts that share this root", "error", err)
		}
		if t := r.member.Ticket(); t != 0 && !r.busy.Load() && t != r.ticket && scans == nil {
			r.ticket = t
			done := make(chan error, 1)
			scans = done
			go func() { done <- r.rescan(ctx) }()
		}
		var kicked <-chan struct{}
		select {
		case <-ctx.Done():
		case <-tick.C:
		case <-time.After(r.root.cfg.Poll / 8): // the most that kicks hurry it
			kicked = r.member.Wakeups()
		}
		if kicked != nil {
			select {
			case <-ctx.Done():
			case <-tick.C:
			case <-kicked:
			}
		}
		select {
		case err := <-scans:
			scans = nil
			if err == nil {
				r.member.Scanned(r.ticket)
			} else {
				r.ticket = 1 // never a member's: again
			}
		default:
		}
		if ctx.Err() != nil {
			if scans != nil {
				<-scans
			}
			return
		}
	}
}

func stepLevel(err error) slog.Level {
	if err == nil {
		return slog.LevelInfo // after an error
	}
	return slog.LevelWarn
}

// lock implements [owner]: it takes the lock of a host that has the root for itself, until this one has joined. In a bucket a lock
// that a host left must lapse; hosts that join do not keep each other out.
func (r *joint) lock(ctx context.Context) error {
	if r.audits == nil {
		return r.lockJoin(ctx)
	}
	if free, err := r.unlocked(); free || err != nil {
		return err
	}
	err := r.lockJoin(ctx)
	r.unlockJoin()
	return err
}

func (r *joint) lockJoin(ctx context.Context) (err error) {
	for begun := r.root.store.cfg.Now(); ; {
		r.gate, err = health.Lock(r.kept.FS, r.kept.Path, r.kept.Path+"/"+pieceformat.LockFile, true, nil)
		if !errors.Is(err, staging.ErrLocked) {
			break
		}
		if r.root.store.cfg.Now().Sub(begun) > joinTimeout {
			return fmt.Errorf("%w: %s: %w; a host has it for itself: stop it, or set shared = true there too", files.ErrBusy,
				r.kept.Path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s: %w", files.ErrBusy, r.kept.Path, ctx.Err())
		case <-time.After(joinTimeout / 100):
		}
	}
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.kept.Path, err)
	}
	return nil
}

func (r *joint) unlockJoin() {
	_ = health.Unlock(r.gate) // the locks go with the descriptors
	r.gate = nil
}

// grants says whether lookups may grant entries.
func (r *joint) grants() bool { return r.member.Fresh() }

// stats are the member's, nil before this host has joined.
func (r *joint) stats() *shared.Stats {
	if r.member == nil {
		return nil
	}
	s := r.member.Stats()
	return &s
}
