package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// fellows is a root's part among the hosts that share it. What differs from a root of one's own: a piece is written against
// credit, and reserves nothing for the entry's other ranks, which may be other hosts'; temporaries are in the member's
// directory; a piece's name is never taken away by who finds it damaged or unwanted, but by the evictor, when nobody has it
// leased. Package shared has the protocol and says why it holds.
type fellows struct {
	root   *root
	member *shared.Member
	poll   time.Duration
	began  time.Time
	ended  chan struct{} // closed when the steps have ended
	stop   context.CancelFunc

	busy   atomic.Bool // enter is under way
	ticket uint64      // of the last scan that was begun: enter's, and then steps'

	// The rest is guarded by root.mu.
	census     *census // of the first scan, while it runs: entries are told to the evict policy when all are there
	dooms      map[shared.ID]*doom
	overlooked int64 // bytes of files that the last scan could make nothing of
	flying     int64 // bytes of the account that are covered by credit: of pieces being written, and of temporaries that would not go
	waiting    int   // puts that wait for credit
}

// doom is an entry that is in the journal, or that this host wants to have there: it is neither granted nor stored.
type doom struct {
	eviction
	entry   bool   // eviction is of an entry of the index, which is leaving
	batch   bool   // it is in the journal
	stray   int64  // bytes in the account besides the entry's
	learned uint64 // ranks among stray
}

const (
	defaultPoll  = time.Second
	defaultLapse = 10 * time.Second
	// creditPolls is how long a put waits for credit, in polls: the evictor has to see that it is wanted, propose victims,
	// and hear from everybody.
	creditPolls = 6
	leastWait   = 2 * time.Second
	// mostWaiting puts wait for credit, the others are shed at once: each keeps others from storing what has its key's stripe.
	mostWaiting = 64
)

func newFellows(r *root) (*fellows, error) {
	c := &fellows{root: r, poll: r.cfg.Poll, began: time.Now(), dooms: map[shared.ID]*doom{}, ended: make(chan struct{})}
	s := r.store
	m, err := shared.New(shared.Config{
		Dir: r.dir, Host: s.cfg.HostID, Capacity: r.cfg.Capacity, High: s.cfg.High, Low: s.cfg.Low, Lapse: r.cfg.Lapse, FS: r.fs, Log: r.log,
		Unique: func() uint64 {
			var b [8]byte
			_, _ = rand.Read(b[:]) // it never fails
			return binary.LittleEndian.Uint64(b[:])
		},
		Now: c.clock,
	}, c)
	c.member = m
	return c, err
}

// enter joins the others. The steps go on until leave. What is there a scan finds, beside the sessions.
func (c *fellows) enter() error {
	r := c.root
	c.census = &census{root: r}
	c.busy.Store(true)
	err := c.member.Step()
	r.openGate()
	if errors.Is(err, shared.ErrLinks) {
		return fmt.Errorf("store: root %s cannot be shared: %w", r.dir, err)
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

// find waits until this host is admitted, and looks at what is there. Until all was seen, the evict policy is told nothing.
func (c *fellows) find(ctx context.Context) error {
	if err := c.admission(ctx); err != nil {
		return err
	}
	c.ticket = c.member.Ticket()
	if err := c.scan(ctx); err != nil {
		return err
	}
	if !c.root.health.Serves() {
		return c.root.health.OutError()
	}
	c.census.order()
	c.root.endScan(ctx, c.census)
	c.member.Scanned(c.ticket)
	c.busy.Store(false)
	return nil
}

// admission waits for an evictor to take this host in.
func (c *fellows) admission(ctx context.Context) error {
	tick := time.NewTicker(c.poll / 8)
	defer tick.Stop()
	for c.member.Ticket() == 0 {
		if d := c.root.cfg.Scheduler; d != nil {
			d.Wait(func() { c.turn(ctx) })
			continue
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("store: root %s: no evictor has admitted this host: %w", c.root.dir, ctx.Err())
		case <-tick.C:
			c.member.Wake()
		}
	}
	return nil
}

// turn is a step under a scheduler, with the scan where one is due.
func (c *fellows) turn(ctx context.Context) {
	_ = c.member.Step()
	if t := c.member.Ticket(); t != 0 && !c.busy.Load() && t != c.ticket {
		c.ticket = 1
		if c.scan(ctx) == nil {
			c.ticket = t
			c.member.Scanned(t)
		}
	}
}

func (c *fellows) clock() time.Duration {
	if d := c.root.cfg.Scheduler; d != nil {
		return d.Now()
	}
	return time.Since(c.began)
}

func (c *fellows) scan(ctx context.Context) error {
	r := c.root
	r.mu.Lock()
	r.account.Remove(capacity.Orphans, c.overlooked)
	c.overlooked = 0
	r.mu.Unlock()
	sight := &census{root: r}
	err := staging.Walk(ctx, r.fs, r.dir, r.store.cfg.ScanWorkers, sight.file, sight.skipped)
	r.overlook(sight.stray)
	return err
}

// leave ends this host's part. Nothing else uses the root any more.
func (c *fellows) leave() {
	if c.stop == nil {
		return
	}
	c.stop()
	<-c.ended
	if err := c.member.Leave(); err != nil {
		c.root.log.Warn("this host left without a word; the others will notice", "error", err)
	}
}

// steps does the member's work until the context is done.
func (c *fellows) steps(ctx context.Context) {
	defer close(c.ended)
	var scans chan error
	last := fmt.Sprint(error(nil))
	tick := time.NewTicker(c.poll)
	defer tick.Stop()
	for {
		err := c.member.Step()
		if text := fmt.Sprint(err); text != last {
			last = text
			c.root.log.Log(ctx, level(err), "step among the hosts that share this root", "error", err)
		}
		if t := c.member.Ticket(); t != 0 && !c.busy.Load() && t != c.ticket && scans == nil {
			c.ticket = t
			done := make(chan error, 1)
			scans = done
			go func() { done <- c.scan(ctx) }()
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
func (c *fellows) reserve(ctx context.Context, w reservation) error {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.reuseFor != nil && w.Bytes > 0 {
		if err := c.takeCreditUnlocking(ctx, w.reuseFor, w.Bytes); err != nil {
			return err
		}
	}
	r.account.Commit(w.Tenant, w.Bytes)
	return r.enter(w)
}

// takeCreditUnlocking gets a put credit for its piece, and waits for it for a while. mu is held, and released meanwhile.
func (c *fellows) takeCreditUnlocking(ctx context.Context, p *Put, bytes int64) error {
	r := c.root
	var over <-chan time.Time
	for passed := 0; ; passed++ {
		more := c.member.More()
		if credit, ok := c.member.Take(bytes); ok {
			p.credit = credit
			c.flying += bytes
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
		r.mu.Unlock()
		var err error
		if d := r.cfg.Scheduler; d != nil {
			if d.Wait(func() { c.turn(ctx) }); passed == creditPolls {
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
		r.mu.Lock()
		if err != nil {
			return err
		}
	}
}

func (c *fellows) noCredit(bytes int64) error {
	return fmt.Errorf("%w: %s: the evictor of the hosts that share it has given this one no credit for %d bytes", ErrNoSpace, c.root.dir, bytes)
}

// giveBack returns a put's credit: nothing that it wrote is on the disk any more. mu is not held.
func (p *Put) giveBack() {
	if p.credit.Bytes() == 0 {
		return
	}
	c := p.root.fellows
	p.root.mu.Lock()
	c.flying -= p.credit.Bytes()
	p.root.mu.Unlock()
	c.member.Give(p.credit)
	p.credit = shared.Credit{}
}

// publish gives the temporary its name. Before the evictor can hear of the piece it counts as one that is there.
func (c *fellows) publish(p *Put, info staging.Info) error {
	r := c.root
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	r.mu.Lock()
	c.flying -= p.credit.Bytes()
	r.mu.Unlock()
	err := c.member.Publish(p.temp, p.target, rec, &p.credit)
	if errors.Is(err, fs.ErrNotExist) && !errors.Is(err, shared.ErrFenced) {
		if err = r.makeDir(filepath.Dir(p.target)); err == nil {
			err = c.member.Publish(p.temp, p.target, rec, &p.credit)
		}
	}
	if err != nil {
		r.mu.Lock()
		c.flying += p.credit.Bytes()
		r.mu.Unlock()
		return err
	}
	p.credit, p.temp = shared.Credit{}, ""
	return nil
}

func (p *Put) record() shared.Record {
	return shared.Record{
		Op: shared.Published, FallbackName: p.detour, Namespace: p.class.ns.digest, Group: p.class.group, Rank: p.rank, Key: p.key, Parent: p.parent,
		Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}

// mayStore says why a key cannot be stored just now, if so. mu is held.
func (c *fellows) mayStore(p *Put) error {
	if c.dooms[shared.ID{Namespace: p.class.ns.digest, Group: p.class.group, Key: p.key}] != nil {
		return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, p.key, c.root.dir)
	}
	if c.root.x.Find(p.mark.print, p.class.base, &p.key) != index.None {
		return fmt.Errorf("%w: another host has just stored %s", ErrResident, p.key)
	}
	return nil
}

// disown tells the evictor that pieces of an entry that left this host's index are to go. Their bytes stay in the account
// until they do; they are returned. mu is not held.
func (c *fellows) disown(d *eviction, pieces uint64) (left int64) {
	r := c.root
	var there uint64
	for rank := range ranksOf(pieces) {
		name, err := r.locatePiece(d.class, &d.key, rank, d.detour)
		if err == nil {
			var info staging.Info
			if info, err = r.fs.Stat(name); err == nil {
				left += pieceformat.Padded(info.Allocated)
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			r.counted(&r.count.vanished)
			r.recount()
			continue
		}
		if err != nil {
			left += d.class.fileBytes()
		}
		there |= 1 << rank
	}
	if there != 0 {
		c.condemn(shared.Record{
			FallbackName: d.detour, Namespace: d.class.ns.digest, Group: d.class.group, Key: d.key, Pieces: there, Bytes: left,
		})
	}
	return left
}

// condemn asks the evictor to remove pieces. Their bytes are, or will be, among the root's strays.
func (c *fellows) condemn(rec shared.Record) {
	r := c.root
	r.mu.Lock()
	id := rec.ID()
	if c.dooms[id] == nil {
		c.dooms[id] = &doom{}
	}
	c.dooms[id].stray += rec.Bytes
	r.mu.Unlock()
	c.member.ReportDamaged(rec)
}
