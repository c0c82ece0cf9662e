package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// joinTimeout is the longest time that a host waits for others that are joining.
const joinTimeout = 5 * time.Second

// unique returns a random number that no other host has.
func unique() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

func (r *joint) directoryMember() (*shared.Member, error) {
	return shared.New(shared.Config{
		Dir: r.kept.Path, Host: r.root.store.cfg.HostID, Capacity: r.root.cfg.Capacity, Lapse: r.root.cfg.Lapse,
		FS: r.kept.FS, Log: r.kept.Log, Unique: unique, Now: r.clock,
	}, backend{r})
}

// join joins the other hosts and makes steps until [joint.leave]. A scan finds the existing entries while sessions already use
// the root. It uses [judge] for the files that it finds.
func (r *joint) join(scans *recovery) error {
	r.scans, scans.overlooked = scans, &r.overlooked
	if err := r.kept.removeCheckpoint(); err != nil { // left by a run that had the root for itself
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

// scan waits until this host is admitted, and then scans the root. The evict policy is told nothing until the scan is complete.
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
	first.End(ctx, func(booked int64) { // until now, the member could add pieces of other hosts to the scan
		r.set.Account.Add(capacity.Orphans, first.Orphaned()-booked)
		r.overlooked += first.Orphaned()
		r.firstScan = nil
	})
	r.member.Scanned(r.ticket)
	r.busy.Store(false)
	return nil
}

// admission waits until an evictor admits this host.
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

// step makes one step under a [Scheduler], including a scan if one is due.
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

// rescan scans every file again, as a host does after it was excluded and has joined again.
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

// leave ends the membership of this host. Nothing else may use the root any more.
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

// silence ends the steps. To the other hosts, this host looks as if it had been killed.
func (r *joint) silence() {
	r.stop()
	<-r.ended
}

// work runs the steps and the audits until the context is done.
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
		case <-time.After(r.root.cfg.Poll / 8): // shortest interval to which wakeups can reduce the steps
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
				r.ticket = 1 // not the ticket of any member, so that the scan is repeated
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

// lock implements [owner]. It takes the lock of a host that has the root for itself, and holds it until this host has joined.
// In a bucket, the lock of a dead host must lapse first, and hosts that join do not exclude each other.
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
	_ = health.Unlock(r.gate) // closing the descriptors releases the locks
	r.gate = nil
}

// grants implements [owner].
func (r *joint) grants() bool { return r.member.Fresh() }

// stats returns the statistics of the member, or nil before this host has joined.
func (r *joint) stats() *shared.Stats {
	if r.member == nil {
		return nil
	}
	s := r.member.Stats()
	return &s
}

// patience is the divisor of the lapse that gives the longest time of a request of the protocol.
const patience = 5

// requestsAtOnce is the maximum number of objects that are read or removed at a time.
const requestsAtOnce = 16

func (r *joint) bucketMember() (*shared.Member, error) {
	cfg := &r.root.cfg
	files, ok := cfg.FS.(objectFS)
	if !ok {
		return nil, fmt.Errorf("%w: root %s is in no bucket", ErrConfig, cfg.Path)
	}
	m, err := shared.New(shared.Config{
		Objects: files.Control(r.kept.Slash+shared.Dir, cfg.Lapse/patience), FS: r.kept.FS, Host: r.root.store.cfg.HostID,
		Capacity: cfg.Capacity, Lapse: cfg.Lapse, Log: r.kept.Log, Unique: unique, Now: r.clock, Workers: requestsAtOnce,
	}, backend{r})
	if err == nil {
		files.WriteWhile(m.Fresh)
	}
	return m, err
}

// unlocked reports whether no host has the bucket for itself.
func (r *joint) unlocked() (bool, error) {
	_, err := r.root.Health.Bare().Stat(r.kept.Slash + pieceformat.LockFile)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return false, err
}
