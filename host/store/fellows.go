package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/bits"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
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
	flying     int64 // bytes of r.used that are covered by credit: of pieces being written
}

// doom is an entry that is in the journal, or that this host wants to have there: it is neither granted nor stored.
type doom struct {
	departure
	entry   bool   // departure is of an entry of the index, which is leaving
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
		Now: func() time.Duration { return time.Since(c.began) },
	}, c)
	c.member = m
	return c, err
}

// enter joins the others and finds what is there. The steps go on until leave.
func (c *fellows) enter(ctx context.Context) error {
	r := c.root
	c.census = &census{root: r}
	c.busy.Store(true)
	if err := c.member.Step(); errors.Is(err, shared.ErrLinks) {
		return fmt.Errorf("store: root %s cannot be shared: %w", r.dir, err)
	}
	run, stop := context.WithCancel(context.Background())
	c.stop = stop
	go c.steps(run)
	tick := time.NewTicker(c.poll / 8)
	defer tick.Stop()
	for c.member.Ticket() == 0 {
		select {
		case <-ctx.Done():
			return fmt.Errorf("store: root %s: no evictor has admitted this host: %w", r.dir, ctx.Err())
		case <-tick.C:
			c.member.Wake()
		}
	}
	c.ticket = c.member.Ticket()
	if err := c.scan(ctx); err != nil {
		return err
	}
	c.census.order()
	r.mu.Lock()
	late := c.census
	c.census = nil
	r.replay()
	r.mu.Unlock()
	r.overlook(late.stray)
	c.member.Scanned(c.ticket)
	c.busy.Store(false)
	return nil
}

func (c *fellows) scan(ctx context.Context) error {
	r := c.root
	r.mu.Lock()
	r.stray -= c.overlooked
	r.used -= c.overlooked
	c.overlooked = 0
	r.mu.Unlock()
	sight := &census{root: r}
	err := scan(ctx, r.fs, r.dir, r.store.cfg.ScanWorkers, sight.file, sight.skipped)
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
			kicked = c.member.Kicked()
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

// take gets a put credit for its piece, and waits for it for a while. mu is held, and let go of meanwhile.
func (c *fellows) take(ctx context.Context, p *Put, bytes int64) error {
	r := c.root
	var over <-chan time.Time
	for {
		more := c.member.More()
		if credit, ok := c.member.Take(bytes); ok {
			p.credit = credit
			c.flying += bytes
			return nil
		}
		if over == nil {
			t := time.NewTimer(max(creditPolls*c.poll, leastWait))
			defer t.Stop()
			over = t.C
		}
		r.mu.Unlock()
		var err error
		select {
		case <-more:
		case <-over:
			err = fmt.Errorf("%w: %s: the evictor of the hosts that share it has given this one no credit for %d bytes", ErrNoSpace, r.dir, bytes)
		case <-ctx.Done():
			err = ctx.Err()
		}
		r.mu.Lock()
		if err != nil {
			return err
		}
	}
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
	rec.Bytes = padded(info.Allocated)
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
		Op: shared.Published, Detour: p.detour, Namespace: p.class.ns.digest, Group: p.class.group, Rank: p.rank, Key: p.key, Parent: p.parent,
		Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}

// mayStore says why a key cannot be stored just now, if so. mu is held.
func (c *fellows) mayStore(p *Put) error {
	if c.dooms[shared.ID{Namespace: p.class.ns.digest, Group: p.class.group, Key: p.key}] != nil {
		return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, p.key, c.root.dir)
	}
	if c.root.x.find(p.mark.print, p.class.base, &p.key) != none {
		return fmt.Errorf("%w: another host has just stored %s", ErrResident, p.key)
	}
	return nil
}

// disown tells the evictor that pieces of an entry that left this host's index are to go. Their bytes stay in the account
// until they do; they are returned. mu is not held.
func (c *fellows) disown(d *departure, pieces uint64) (left int64) {
	r := c.root
	var there uint64
	for rank := range uint32(chunk.MaxRanks) {
		if pieces&(1<<rank) == 0 {
			continue
		}
		name, err := r.locatePiece(d.class, &d.key, rank, d.detour)
		if err == nil {
			var info staging.Info
			if info, err = r.fs.Stat(name); err == nil {
				left += padded(info.Allocated)
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
			Detour: d.detour, Namespace: d.class.ns.digest, Group: d.class.group, Key: d.key, Pieces: there, Bytes: left,
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
	c.member.Bad(rec)
}

// What follows is what the member asks; see [shared.Backend].

func (c *fellows) classOf(ns chunk.Digest, group uint32, key *chunk.Key) (*class, error) {
	h := Header{Namespace: ns, Group: group, Key: *key}
	cl, err := c.root.store.classFor(&h)
	if errors.Is(err, ErrSpace) {
		if err = c.root.loadNamespaces(); err == nil { // an engine of another host's has opened it
			cl, err = c.root.store.classFor(&h)
		}
	}
	return cl, err
}

// Learn implements [shared.Backend].
func (c *fellows) Learn(rec *shared.Record) {
	r := c.root
	cl, err := c.classOf(rec.Namespace, rec.Group, &rec.Key)
	if err != nil {
		r.log.Warn("another host's piece is of a namespace that cannot be read; it is found at the next start", "key", rec.Key, "error", err)
		r.overlook(rec.Bytes)
		return
	}
	r.mu.Lock()
	d := c.dooms[rec.ID()]
	if d != nil && d.learned&(1<<rec.Rank) == 0 && !(d.entry && d.pieces&(1<<rec.Rank) != 0) {
		d.learned |= 1 << rec.Rank
		d.stray += rec.Bytes
		r.stray += rec.Bytes
		r.used += rec.Bytes
	}
	r.mu.Unlock()
	if d == nil {
		h := Header{
			Namespace: rec.Namespace, Group: rec.Group, Rank: rec.Rank, Key: rec.Key, Parent: rec.Parent, Depth: rec.Depth, Tenant: rec.Tenant,
			Pieces: rec.Pieces, StoreTime: rec.StoreTime, DataOffset: Page, Payload: max(Page, rec.Bytes-Page),
		}
		c.see(cl, &h, rec.Bytes, rec.Detour)
	}
}

// see enters a piece that another host stored, or that a scan has found.
func (c *fellows) see(cl *class, h *Header, allocated int64, detour bool) {
	r := c.root
	r.mu.Lock()
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	print := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	if slot := r.x.find(print, cl.base, &h.Key); c.dooms[id] != nil || slot != none && r.x.at(slot).is(stLeaving) {
		r.mu.Unlock()
		return
	}
	sight := c.census
	r.mu.Unlock()
	h.Pieces = 1 << h.Rank // nothing is reserved for ranks that may be written by others
	if sight != nil {
		sight.adopt(cl, h, allocated, detour)
		return
	}
	late := &census{root: r, late: true}
	late.adopt(cl, h, allocated, detour)
	r.overlook(late.stray)
	r.mu.Lock()
	defer r.mu.Unlock()
	if slot := r.x.find(print, cl.base, &h.Key); slot != none {
		if e := r.x.at(slot); !e.any(stLeaving | stAnnounced) {
			r.x.touch(slot)
			r.announce(abi.OpResident, slot, print, 0)
		}
	}
}

// Touched implements [shared.Backend].
func (c *fellows) Touched(prints []uint64) {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, print := range prints {
		if slot := r.x.findPrint(print); slot != none {
			if e := r.x.at(slot); e.is(stAnnounced) && !e.is(stLeaving) {
				r.x.touch(slot)
				r.event(abi.OpTouch, slot, print, none, 0)
			}
		}
	}
}

// Condemn implements [shared.Backend].
func (c *fellows) Condemn(v *shared.Victim) bool {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.mu.Lock()
	defer r.mu.Unlock()
	d := c.dooms[v.ID()]
	if d == nil {
		d = &doom{}
	}
	if err == nil && !d.entry {
		print := chunk.Fingerprint(v.Namespace, v.Group, v.Key)
		if slot := r.x.find(print, cl.base, &v.Key); slot != none && !r.x.at(slot).is(stLeaving) {
			if _, busy := r.flights[slot]; busy || r.x.at(slot).pins > 0 {
				return false
			}
			d.departure, d.entry = r.leave(slot), true
		}
	}
	d.batch = true
	c.dooms[v.ID()] = d
	return true
}

// Decide implements [shared.Backend].
func (c *fellows) Decide(v *shared.Victim, removed bool) {
	r := c.root
	r.mu.Lock()
	d := c.dooms[v.ID()]
	if d == nil {
		r.mu.Unlock()
		return
	}
	delete(c.dooms, v.ID())
	r.stray -= d.stray
	r.used -= d.stray
	if d.entry {
		d.departure.stray = 0
		if removed {
			r.count.evictions++
		}
		r.expelled(&d.departure)
	}
	r.settled.Broadcast()
	r.mu.Unlock()
	if removed && d.learned == 0 {
		return
	}
	for _, name := range c.Paths(v) { // spared, or stored again since; it may be granted, if it is there
		h, info, err := r.look(name)
		if err != nil {
			continue
		}
		if cl, err := c.classOf(h.Namespace, h.Group, &h.Key); err == nil {
			c.see(cl, &h, padded(info.Allocated), v.Detour)
		}
	}
}

// Fenced implements [shared.Backend]. Entries that went meanwhile are found gone by who opens them. What this host wanted
// to be removed the others may not have heard; the scan will find it.
func (c *fellows) Fenced() {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, d := range c.dooms {
		if !d.batch {
			delete(c.dooms, id)
			r.stray -= d.stray
			r.used -= d.stray
		}
	}
}

// Victims implements [shared.Backend].
func (c *fellows) Victims(bytes int64) (list []shared.Victim) {
	r := c.root
	r.mu.Lock()
	defer r.mu.Unlock()
	var slots [maxAsked]uint32
	n := r.ask(abi.Ask{Bytes: uint64(bytes), MaxVictims: maxAsked, Tenant: abi.None}, slots[:])
	for _, slot := range slots[:n] {
		if bytes <= 0 {
			break
		}
		if _, busy := r.flights[slot]; busy || !r.evictable(slot) {
			r.count.badVictims++
			continue
		}
		e := r.x.at(slot)
		cl := r.classOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.ns.digest, Group: cl.group, Key: r.x.key(slot), Pieces: r.x.pieces(slot), Detour: e.is(stDetour), Bytes: r.x.bytes(slot),
		})
		bytes -= r.x.bytes(slot)
	}
	return list
}

// Used implements [shared.Backend].
func (c *fellows) Used() int64 {
	c.root.mu.Lock()
	defer c.root.mu.Unlock()
	others := max(0, c.root.cfg.Capacity-c.root.limit()) // what is to be left free, and is not
	return c.root.used - c.flying + others
}

// Paths implements [shared.Backend].
func (c *fellows) Paths(v *shared.Victim) (names []string) {
	r := c.root
	cl, err := c.classOf(v.Namespace, v.Group, &v.Key)
	r.mu.Lock()
	if d := c.dooms[v.ID()]; d != nil && d.entry {
		cl, err = d.class, nil
	}
	r.mu.Unlock()
	if err != nil {
		r.log.Error("a victim has no name", "key", v.Key, "error", err)
		return nil
	}
	for ranks := v.Pieces; ranks != 0; ranks &= ranks - 1 {
		name, err := r.locatePiece(cl, &v.Key, uint32(bits.TrailingZeros64(ranks)), v.Detour)
		if err != nil {
			r.log.Error("a victim has no name", "key", v.Key, "error", err)
			continue
		}
		names = append(names, name)
	}
	return names
}

// Identify implements [shared.Backend].
func (c *fellows) Identify(temp string, info staging.Info) (shared.Record, error) {
	h, err := c.root.readHeader(temp)
	if err != nil {
		return shared.Record{}, err
	}
	return shared.Record{
		Namespace: h.Namespace, Group: h.Group, Rank: h.Rank, Key: h.Key, Parent: h.Parent, Depth: h.Depth, Tenant: h.Tenant,
		Pieces: h.Pieces, Bytes: padded(info.Allocated), StoreTime: h.StoreTime,
	}, nil
}

// overlook accounts for a file that is not served.
func (r *root) overlook(bytes int64) {
	r.mu.Lock()
	r.stray += bytes
	r.used += bytes
	r.fellows.overlooked += bytes
	r.mu.Unlock()
}

// SharedStats is a root's part among the hosts that share it.
type SharedStats = shared.Stats

func (c *fellows) stats() *SharedStats {
	if c == nil {
		return nil
	}
	s := c.member.Stats()
	return &s
}

// found enters a piece that a scan has met. It may have gone since its header was read.
func (c *fellows) found(name string, cl *class, h *Header, allocated int64, detour bool) {
	r := c.root
	c.see(cl, h, allocated, detour)
	if _, err := r.fs.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	r.mu.Lock()
	print := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	slot := r.x.find(print, cl.base, &h.Key)
	r.mu.Unlock()
	if slot != none {
		r.drop(mark{slot, print}, 0)
	}
}
