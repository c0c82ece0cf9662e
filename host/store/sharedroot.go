package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// sharedRoot is a root's part among the hosts that share it. What differs from a root of one's own: a piece is written
// against credit, and reserves nothing for the entry's other ranks, which may be other hosts'; temporaries are in the
// member's directory; a piece's name is never taken away by who finds it damaged or unwanted, but by the evictor, when
// nobody has it leased. Package shared has the protocol and says why it holds.
type sharedRoot struct {
	leftToEvictor
	root   *root
	member *shared.Member
	poll   time.Duration
	began  time.Time
	ended  chan struct{} // closed when the steps have ended
	stop   context.CancelFunc
	gate   io.Closer // held until this host has joined the others

	busy   atomic.Bool // enter is under way
	ticket uint64      // of the last scan that was begun: enter's, and then steps'

	// The rest is guarded by root.mu.
	firstScan  *recovery.Scan // the first scan the first scan, while it runs: entries are told to the evict policy when all are there
	pending    map[shared.ID]*pendingEviction
	overlooked int64 // bytes of files that the last scan could make nothing of
	inFlight   int64 // bytes of the account that are covered by credit: of pieces being written, and of temporaries that would not go
	waiting    int   // puts that wait for credit
}

// pendingEviction is an entry that is in the journal, or that this host wants to have there: it is neither granted nor
// stored.
type pendingEviction struct {
	entries.Eviction
	entry    bool   // eviction is of an entry of the index, which is leaving
	batch    bool   // it is in the journal
	orphaned int64  // bytes in the account besides the entry's
	learned  uint64 // ranks whose bytes are in orphaned
}

const (
	defaultPoll  = time.Second
	defaultLapse = 10 * time.Second
	// creditPolls is how long a put waits for credit, in polls: the evictor has to see that it is wanted, propose victims,
	// and hear from everybody.
	creditPolls = 6
	leastWait   = 2 * time.Second
	// mostWaiting puts wait for credit, the others are shed at once: each keeps others from storing what has its key's
	// stripe.
	mostWaiting = 64
)

// newSharedRoot is the custody of a root that has not joined: see recover.
func newSharedRoot(r *root) *sharedRoot {
	return &sharedRoot{root: r, poll: r.cfg.Poll, began: r.store.cfg.Now(), pending: map[shared.ID]*pendingEviction{}}
}

func (c *sharedRoot) newMember() (*shared.Member, error) {
	r, s := c.root, c.root.store
	return shared.New(shared.Config{
		Dir: r.Path, Host: s.cfg.HostID, Capacity: r.cfg.Capacity, High: s.cfg.High, Low: s.cfg.Low, Lapse: r.cfg.Lapse, FS: r.FS, Log: r.Log,
		Unique: func() uint64 {
			var b [8]byte
			_, _ = rand.Read(b[:]) // it never fails
			return binary.LittleEndian.Uint64(b[:])
		},
		Now: c.clock,
	}, sharedBackend{c})
}

// recover joins the others. The steps go on until leave. What is there a scan finds, beside the sessions.
func (c *sharedRoot) recover(context.Context) error {
	r := c.root
	if err := r.kept.RemoveCheckpoint(); err != nil { // of a run that had the root to itself
		return err
	}
	m, err := c.newMember()
	if err != nil {
		return err
	}
	r.Lock()
	r.BeginScan()
	c.member, c.firstScan, c.ended, r.Touched = m, r.recovery.NewScan(), make(chan struct{}), m.Touch
	c.pending, c.overlooked, c.inFlight, c.ticket = map[shared.ID]*pendingEviction{}, 0, 0, 0
	r.Unlock()
	c.busy.Store(true)
	err = c.member.Step()
	c.unlockJoin()
	if errors.Is(err, shared.ErrLinks) {
		return fmt.Errorf("store: root %s cannot be shared: %w", r.Path, err)
	}
	run, stop := context.WithCancel(context.Background())
	c.stop = stop
	if r.cfg.Scheduler == nil {
		go c.steps(run)
	} else {
		close(c.ended)
	}
	return nil
}

// scan waits until this host is admitted, and looks at what is there. Until all was seen, the evict policy is told
// nothing.
func (c *sharedRoot) scan(ctx context.Context) error {
	if err := c.admission(ctx); err != nil {
		return err
	}
	c.ticket = c.member.Ticket()
	if err := c.rescan(ctx); err != nil {
		return err
	}
	if !c.root.Health.Serves() {
		return c.root.Health.OutError()
	}
	first := c.firstScan
	first.Order()
	first.End(ctx, func(booked int64) { // it has learned of other hosts' pieces until now
		c.root.Account.Add(capacity.Orphans, first.Orphaned()-booked)
		c.overlooked += first.Orphaned()
		c.firstScan = nil
	})
	c.member.Scanned(c.ticket)
	c.busy.Store(false)
	return nil
}

// admission waits for an evictor to take this host in.
func (c *sharedRoot) admission(ctx context.Context) error {
	tick := time.NewTicker(c.poll / 8)
	defer tick.Stop()
	for c.member.Ticket() == 0 {
		if d := c.root.cfg.Scheduler; d != nil {
			d.Wait(func() { c.step(ctx) })
			continue
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("store: root %s: no evictor has admitted this host: %w", c.root.Path, ctx.Err())
		case <-tick.C:
			c.member.Wake()
		}
	}
	return nil
}

// step is one under a scheduler, with the scan where one is due.
func (c *sharedRoot) step(ctx context.Context) {
	_ = c.member.Step()
	if t := c.member.Ticket(); t != 0 && !c.busy.Load() && t != c.ticket {
		c.ticket = 1
		if c.rescan(ctx) == nil {
			c.ticket = t
			c.member.Scanned(t)
		}
	}
}

func (c *sharedRoot) clock() time.Duration {
	if d := c.root.cfg.Scheduler; d != nil {
		return d.Now()
	}
	return c.root.store.cfg.Now().Sub(c.began)
}

func (c *sharedRoot) rescan(ctx context.Context) error {
	r := c.root
	r.Lock()
	r.Account.Remove(capacity.Orphans, c.overlooked)
	c.overlooked = 0
	r.Unlock()
	found := r.recovery.NewScan()
	err := found.Walk(ctx)
	c.overlook(found.Orphaned())
	return err
}

func (c *sharedRoot) leave() {
	defer c.unlockJoin()
	if c.stop == nil {
		return
	}
	c.stop()
	<-c.ended
	if err := c.member.Leave(); err != nil {
		c.root.Log.Warn("shared root left without notice; the other hosts will give this one up", "error", err)
	}
	c.stop = nil
}

// steps does the member's work until the context is done.
func (c *sharedRoot) steps(ctx context.Context) {
	defer close(c.ended)
	var scans chan error
	last := fmt.Sprint(error(nil))
	tick := time.NewTicker(c.poll)
	defer tick.Stop()
	for {
		err := c.member.Step()
		if text := fmt.Sprint(err); text != last {
			last = text
			c.root.Log.Log(ctx, level(err), "step among the hosts that share this root", "error", err)
		}
		if t := c.member.Ticket(); t != 0 && !c.busy.Load() && t != c.ticket && scans == nil {
			c.ticket = t
			done := make(chan error, 1)
			scans = done
			go func() { done <- c.rescan(ctx) }()
		}
		var kicked <-chan struct{}
		pause := time.NewTimer(c.poll / 8) // the most that kicks hurry it
		select {
		case <-ctx.Done():
		case <-tick.C:
		case <-pause.C:
			kicked = c.member.Wakeups()
		}
		pause.Stop()
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
				c.member.Scanned(c.ticket)
			} else {
				c.ticket = 1 // never a member's: again
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

func level(err error) slog.Level {
	if err == nil {
		return slog.LevelInfo // after an error
	}
	return slog.LevelWarn
}

// reserve books a put's bytes against credit. The evictor makes room for them.
func (c *sharedRoot) reserve(ctx context.Context, w reservation) error {
	r := c.root
	r.Lock()
	defer r.Unlock()
	if w.reuseFor != nil && w.Bytes > 0 {
		if err := c.takeCreditUnlocking(ctx, w.reuseFor, w.Bytes); err != nil {
			return err
		}
	}
	r.Account.Commit(w.Tenant, w.Bytes)
	err := w.booked(r)
	if p := w.reuseFor; err != nil && p != nil {
		// The bytes have left the account; the evictor, which subtracts those in flight, must not see one without the other.
		c.inFlight -= p.credit.Bytes()
		c.member.Give(p.credit)
		p.credit = shared.Credit{}
	}
	return err
}

// takeCreditUnlocking gets a put credit for its piece, and waits for it for a while. mu is held, and released
// meanwhile.
func (c *sharedRoot) takeCreditUnlocking(ctx context.Context, p *Put, bytes int64) error {
	r := c.root
	var over <-chan time.Time
	for passed := 0; ; passed++ {
		more := c.member.More()
		if credit, ok := c.member.Take(bytes); ok {
			p.credit = credit
			c.inFlight += bytes
			return nil
		}
		if over == nil {
			if c.waiting == mostWaiting {
				return c.noCredit(bytes)
			}
			c.waiting++
			defer func() { c.waiting-- }()
			t := time.NewTimer(max(creditPolls*c.poll, leastWait))
			defer t.Stop()
			over = t.C
		}
		r.Unlock()
		var err error
		if d := r.cfg.Scheduler; d != nil {
			if d.Wait(func() { c.step(ctx) }); passed == creditPolls {
				err = c.noCredit(bytes)
			}
		} else {
			select {
			case <-more:
			case <-over:
				err = c.noCredit(bytes)
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		r.Lock()
		if err != nil {
			return err
		}
	}
}

func (c *sharedRoot) noCredit(bytes int64) error {
	return fmt.Errorf("%w: %s: the evictor of the hosts that share it has given this one no credit for %d bytes", ErrNoSpace, c.root.Path, bytes)
}

func (c *sharedRoot) giveBack(p *Put) {
	c.returned(p.credit)
	p.credit = shared.Credit{}
}

func (c *sharedRoot) returned(credit shared.Credit) {
	if credit.Bytes() == 0 {
		return
	}
	c.root.Lock()
	c.inFlight -= credit.Bytes()
	c.root.Unlock()
	c.member.Give(credit)
}

// publish gives the temporary its name. Before the evictor can hear of the piece it counts as one that is there.
func (c *sharedRoot) publish(p *Put, info staging.Info) error {
	r := c.root
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	r.Lock()
	c.inFlight -= p.credit.Bytes()
	r.Unlock()
	err := c.member.Publish(p.temp, p.target, rec, &p.credit)
	if errors.Is(err, fs.ErrNotExist) && !errors.Is(err, shared.ErrFenced) {
		if err = r.MakeDir(filepath.Dir(p.target)); err == nil {
			err = c.member.Publish(p.temp, p.target, rec, &p.credit)
		}
	}
	if err != nil {
		r.Lock()
		c.inFlight += p.credit.Bytes()
		r.Unlock()
		return err
	}
	p.credit, p.temp = shared.Credit{}, ""
	return nil
}

func (p *Put) record() shared.Record {
	return shared.Record{
		Op: shared.Published, FallbackName: p.fallback, Namespace: p.class.Namespace.Digest, Group: p.class.Group, Rank: p.rank, Key: p.key, Parent: p.parent,
		Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}

func (c *sharedRoot) mayInsert(p *Put) error {
	if c.pending[shared.ID{Namespace: p.class.Namespace.Digest, Group: p.class.Group, Key: p.key}] != nil {
		return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, p.key, c.root.Path)
	}
	if c.root.Index.Find(p.mark.Fingerprint, p.class.Base, &p.key) != index.None {
		return fmt.Errorf("%w: another host has just stored %s", ErrResident, p.key)
	}
	return nil
}

// unlink tells the evictor that pieces of an entry that left this host's index are to go. Their bytes stay in the
// account until they do; they are returned. mu is not held.
func (c *sharedRoot) unlink(d *entries.Eviction, pieces uint64) (left int64, _ error) {
	r := c.root
	var there uint64
	for rank := range ranksOf(pieces) {
		name, err := r.Locate(d.Class, &d.Key, rank, d.FallbackName)
		if err == nil {
			var info staging.Info
			if info, err = r.FS.Stat(name); err == nil {
				left += pieceformat.Padded(info.Allocated)
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			r.Counted(&r.Count.Vanished)
			r.Quarantine.Recount()
			continue
		}
		if err != nil {
			left += d.Class.FileBytes()
		}
		there |= 1 << rank
	}
	if there != 0 {
		c.propose(shared.Record{
			FallbackName: d.FallbackName, Namespace: d.Class.Namespace.Digest, Group: d.Class.Group, Key: d.Key, Pieces: there, Bytes: left,
		})
	}
	return left, nil
}

// propose asks the evictor to remove pieces. Their bytes are, or will be, among the root's orphans.
func (c *sharedRoot) propose(rec shared.Record) {
	r := c.root
	r.Lock()
	id := rec.ID()
	if c.pending[id] == nil {
		c.pending[id] = &pendingEviction{}
	}
	c.pending[id].orphaned += rec.Bytes
	r.Unlock()
	c.member.ReportDamaged(rec)
}
