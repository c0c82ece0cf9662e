package store

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"time"

	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/staging"
)

// While a root is scanned, the store serves: lookups find what the scan has seen, and what was stored since. Until the
// scan has ended,
//
//   - the account has, beside the entries seen, an upper bound of the bytes that the others take: all that is in use on the
//     file system. A put that does not fit beside that is shed, and nothing is evicted, for nobody knows yet what is oldest.
//   - a put first looks whether its file is there already, unseen: then it is taken into the index, and the put is told
//     that it is resident.
//   - the evict policy is told nothing. At the end it hears of everything in order of last touch, what was touched
//     meanwhile last, a slice at a time.

// ownScan is the scan of a root that this host has for itself.
type ownScan struct{ *root }

func (r ownScan) begin() error {
	if _, err := r.FS.ReadDir(r.Path); err != nil {
		return err
	}
	// What is found counts as stored. Who wrote it may have been killed before it was durable.
	if r.store.cfg.Durability != None {
		if err := r.FS.SyncFS(r.Path); err != nil {
			return r.SyncFailed(err)
		}
	}
	r.Lock()
	defer r.Unlock()
	r.BeginScan()
	unscanned := r.cfg.Capacity
	if space, err := r.FS.Statfs(r.Path); err == nil {
		unscanned = max(0, space.Total-space.Free)
	}
	r.Account.Add(capacity.Unscanned, unscanned)
	r.scanState.Store(newScan(r.root)) // before the first put, which looks for its file itself
	return nil
}

// scanAll scans until it has seen everything. What goes wrong is sent to failed, if somebody waits for that, and then
// tried again.
func (r *root) scanAll(ctx context.Context, failed chan<- error) {
	if r.Evictor.HoldHandovers(ctx) != nil { // nobody takes over meanwhile
		return
	}
	defer r.Evictor.AllowHandovers()
	for pause := time.Second; ; pause = min(2*pause, time.Minute) {
		err := r.scanOnce(ctx)
		if err == nil {
			close(r.scanned)
			return
		}
		select {
		case failed <- err:
		default:
			r.Log.Error("the scan failed and is begun again; what it has not seen are misses", "error", err, "pause", pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (r *root) scanOnce(ctx context.Context) error {
	defer r.reportScan(ctx)()
	return r.custody.scan(ctx)
}

// run scans until everything was seen once.
func (r ownScan) run(ctx context.Context) error {
	start, c := time.Now(), r.scanState.Load()
	err := staging.Walk(ctx, r.FS, r.Path, r.store.cfg.ScanWorkers, c.file, c.skipped)
	if err == nil && !r.Health.Serves() {
		err = r.Health.OutError() // half a scan is no account of what is there
	}
	if err != nil {
		r.scanState.Store(newScan(r.root)) // of the next attempt
		return err
	}
	r.scanState.Store(nil)
	c.settle(c.Close())
	c.order()
	r.endScan(ctx, c)
	r.shrink(ctx)
	if took := time.Since(start); took > time.Second {
		r.Log.Info("scanned", "files", r.count.scanned.Load(), "took", took)
	}
	return ctx.Err()
}

// settle looks again for files that may have gone with an entry that was removed during the scan.
func (c *scanState) settle(unsure []entries.MarkedPiece) {
	r := c.root
	for _, p := range unsure {
		r.Lock()
		stands := r.Stands(p.Mark)
		var left entries.Eviction
		if stands {
			e := r.Index.At(p.Slot)
			left = entries.Eviction{Class: r.ClassOf(p.Slot), Key: r.Index.Key(p.Slot), FallbackName: e.Is(index.FallbackName)}
		}
		r.Unlock()
		if !stands {
			continue
		}
		if name, err := r.Locate(left.Class, &left.Key, p.Rank, left.FallbackName); err == nil {
			if _, err := r.FS.Stat(name); errors.Is(err, fs.ErrNotExist) {
				r.drop(p.Mark, 0)
			}
		}
	}
}

// order gives what the scan found, and nobody has touched since, its last touch: in the order of the list of touches
// what stands there, unless it was stored later, and then the rest by the time of storing.
func (c *scanState) order() {
	r := c.root
	place, when := savedIndex{r}.loadTouches()
	var list []recovery.Found
	newest := when
	r.Lock()
	r.Index.Each(func(slot uint32, e *index.Entry) {
		if e.LastTouch() != 0 {
			return
		}
		f := recovery.Found{Slot: slot, Time: c.Stored(slot)}
		if int(slot) < len(place) && f.Time <= when {
			f.Place = place[slot]
		}
		newest = max(newest, f.Time)
		list = append(list, f)
	})
	r.Unlock()
	recovery.ByLastTouch(list)
	r.Lock()
	for i, f := range list {
		if e := r.Index.At(f.Slot); e.Is(index.Live) && e.LastTouch() == 0 {
			e.SetLastTouch(uint32(i + 1))
		}
	}
	r.Index.AdvanceClock(uint32(len(list)))
	r.Unlock()
	r.store.seq.StampsFrom(newest)
}

// reportScan tells the log how far a scan has come, until it is called off.
func (r *root) reportScan(ctx context.Context) (end func()) {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(scanReport)
		defer tick.Stop()
		for start := time.Now(); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				r.Lock()
				entries := r.Index.Len()
				r.Unlock()
				r.Log.Info("the scan goes on", "files", r.count.scanned.Load(), "entries", entries, "for", time.Since(start).Round(time.Second))
			}
		}
	}()
	return func() {
		stop()
		<-ended
	}
}

// scanReport is how often the log hears of a scan.
const scanReport = 5 * time.Second

// endScan replaces the bound by the account and tells the evict policy what is here. When the store is closed before
// all is told, the scan has not ended: else the policy's state would be kept, and what it lacks would never be a
// victim.
func (r *root) endScan(ctx context.Context, c *scanState) {
	r.Lock()
	orphaned := c.Orphaned()
	r.Account.Add(capacity.Orphans, orphaned)
	r.Account.Remove(capacity.Unscanned, math.MaxInt64)
	r.Unlock()
	_ = r.Evictor.EndScan(ctx, func() { // what fails is the store being closed
		r.custody.scanEnded(c, orphaned)
		r.EndScan()
	})
}

// seekUnseen takes the file of a piece that a scan has not come to into the index.
func (s *Store) seekUnseen(p *Put) {
	for _, r := range s.roots {
		c := r.scanState.Load()
		if c == nil || !r.Health.Serves() {
			continue
		}
		for _, builtin := range [...]bool{false, true} {
			name, err := r.PathOf(p.class, &p.key, p.rank, builtin)
			if err != nil || r.Orphans.Has(name) {
				continue
			}
			if h, info, err := r.Look(name); err == nil && p.class.IsPiece(&h, &p.key, p.rank) {
				c.Add(p.class, &h, pieceformat.Padded(info.Allocated), builtin)
				break
			}
		}
	}
}

// ScanDone is closed once every root's scan has ended. It stays open when the store is closed before that.
func (s *Store) ScanDone() <-chan struct{} { return s.scanDone }

// scanRoots starts the scans that are due, and waits for them as long as told. One that fails is begun again, and
// fails Open where there is no other root.
func (s *Store) scanRoots(ctx context.Context) error {
	failed := make(chan error)
	for _, r := range s.roots {
		switch {
		case r.unavailable.Load() || !r.Scanning():
		case r.cfg.Scheduler != nil:
			if err := r.scanOnce(ctx); err != nil {
				return err
			}
			close(r.scanned)
		default:
			s.work.Go(func() { r.scanAll(s.run, failed) })
		}
	}
	s.work.Go(func() {
		for _, r := range s.roots {
			select {
			case <-r.scanned:
			case <-s.run.Done():
				return
			}
		}
		s.catalog.EndScan()
		if s.catalog.Lock(s.run) == nil {
			s.catalog.ForgetUnregistered()
			s.catalog.Unlock()
		}
		close(s.scanDone)
	})
	if s.cfg.ScanWait < 0 {
		return nil
	}
	patience := time.NewTimer(s.cfg.ScanWait)
	defer patience.Stop()
	for {
		select {
		case <-s.scanDone:
			return nil
		case err := <-failed:
			if len(s.roots) == 1 {
				return err
			}
			s.log.Error("a scan failed and is begun again; what it has not seen are misses", "error", err)
		case <-ctx.Done():
			return ctx.Err()
		case <-patience.C:
			s.log.Info("the store serves while its roots are scanned")
			return nil
		}
	}
}
