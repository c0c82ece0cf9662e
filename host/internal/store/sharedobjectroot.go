package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/store/shared/bucket"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// sharedObjectRoot is the [kind] of a root in a bucket that several hosts share: a [sharedRoot] with another protocol, that of
// package bucket. A temporary is not seen by others, wherever it stands. What hosts that are gone have stored and told nobody is
// found by audits.
type sharedObjectRoot struct {
	*sharedRoot
	audits *audits
}

// audits lists the bucket when the member asks for that.
type audits struct {
	root   *sharedRoot
	member *bucket.Member
	told   map[string]uint64 // objects that were reported: nothing more can be made of those that are not known yet
}

// objectFS is what a shared root in a bucket needs of its file system besides files.
type objectFS interface {
	Control(name string, patience time.Duration) *s3fs.Control
	WriteWhile(may func() bool)
	Pieces(found func(rel string, info staging.Info)) error
}

// patience is the part of the lapse, 1/n, that a request of the protocol may take.
const patience = 5

// requestsAtOnce is how many objects are read or removed at a time.
const requestsAtOnce = 16

func newSharedObjectRoot(r *root) sharedObjectRoot {
	c := sharedObjectRoot{newSharedRoot(r), &audits{told: map[string]uint64{}}}
	c.audits.root = c.sharedRoot
	c.newMember = c.bucketMember
	return c
}

func (r sharedObjectRoot) bucketMember() (member, error) {
	cfg := &r.root.cfg
	files, ok := cfg.FS.(objectFS)
	if !ok {
		return nil, fmt.Errorf("%w: root %s is in no bucket", ErrConfig, cfg.Path)
	}
	m, err := bucket.New(bucket.Config{
		Objects: files.Control(r.kept.Slash+shared.Dir, cfg.Lapse/patience), FS: r.kept.FS, Host: r.root.store.cfg.HostID,
		Capacity: cfg.Capacity, Lapse: cfg.Lapse, Log: r.kept.Log, Unique: unique, Now: r.clock, Workers: requestsAtOnce,
	}, backend{r.sharedRoot})
	if err == nil {
		files.WriteWhile(m.Fresh)
		r.set.Lock()
		r.audits.member = m
		r.set.Unlock()
	}
	return m, err
}

// lockOut implements [kind]: a lock that a host left which had the bucket for itself must lapse. Hosts that join do not keep each other
// out.
func (r sharedObjectRoot) lockOut(ctx context.Context) error {
	if free, err := r.unlocked(); free || err != nil {
		return err
	}
	err := r.sharedRoot.lockOut(ctx)
	r.unlockJoin()
	return err
}

// unlocked says that no host has the bucket for itself.
func (r sharedObjectRoot) unlocked() (bool, error) {
	_, err := r.root.Health.Bare().Stat(r.kept.Slash + pieceformat.LockFile)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return false, err
}

// recover implements [kind]. A host that wants the bucket for itself locks it, and then looks for others; this one has joined, and then looks
// for the lock: of two that start at the same time one sees the other.
func (r sharedObjectRoot) recover(ctx context.Context) error {
	if err := r.sharedRoot.recover(ctx); err != nil {
		return err
	}
	if free, err := r.unlocked(); free || err != nil {
		return err
	}
	r.leave()
	return fmt.Errorf("%w: %s: a host has it for itself: stop it, or set shared = true there too", ErrRootBusy, r.kept.Path)
}

// identify implements [kind].
func (r sharedObjectRoot) identify() (empty bool, err error) {
	if empty, err = r.sharedRoot.identify(); err == nil {
		err = r.root.answers(r.file(pieceformat.ProbeFile))
	}
	return empty, err
}

// start implements [kind].
func (r sharedObjectRoot) start() {
	if s := r.root.store; r.root.cfg.Scheduler == nil {
		s.work.Go(func() { r.audits.run(s.run) })
	}
}

// step implements [kind].
func (r sharedObjectRoot) step(ctx context.Context) {
	r.sharedRoot.step(ctx)
	r.audits.pass(ctx, 0)
}

// run makes audits until the context is done.
func (a *audits) run(ctx context.Context) {
	tick := time.NewTicker(a.root.root.cfg.Poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.pass(ctx, 2*a.root.root.cfg.Poll)
		}
	}
}

// pass makes an audit if one is due. What others stored while the bucket was listed is known a while later.
func (a *audits) pass(ctx context.Context, while time.Duration) {
	r := a.root
	r.set.Lock()
	m := a.member
	r.set.Unlock()
	if m == nil {
		return
	}
	ticket := m.Audit()
	if ticket == 0 {
		return
	}
	unknown := map[string]staging.Info{}
	named := a.named()
	err := r.root.cfg.FS.(objectFS).Pieces(func(rel string, info staging.Info) {
		if !named[rel] && !a.knows(rel) {
			unknown[rel] = info
		}
	})
	if err != nil {
		r.kept.Log.Warn("the bucket could not be listed; it is tried again", "error", err)
		return
	}
	if len(unknown) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(while):
		}
	}
	var strays []bucket.Stray
	for rel, info := range unknown {
		if !a.knows(rel) && a.told[rel] != info.Ino {
			a.told[rel] = info.Ino
			strays = append(strays, bucket.Stray{Path: r.kept.Slash + rel, Info: info})
		}
	}
	m.Audited(ticket, strays)
}

// named are the names of pieces that are not the built-in ones.
func (a *audits) named() map[string]bool {
	s, names := a.root.set, map[string]bool{}
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, _ *index.Entry) {
		for _, n := range s.Index.NamesOf(slot) {
			names[n.Path] = true
		}
	})
	return names
}

// knows says that what has a built-in name is a piece in the account.
func (a *audits) knows(rel string) bool {
	h, ok := pieceformat.ParseBuiltin([]byte(rel))
	if !ok {
		return false
	}
	cl, err := a.root.kept.Catalog.ClassFor(&h)
	if err != nil {
		return false
	}
	s := a.root.set
	s.Lock()
	defer s.Unlock()
	slot := s.Index.Find(kv.Fingerprint(h.Namespace, h.Group, h.Key), cl.Base, &h.Key)
	return slot != index.None && s.Index.Pieces(slot)&(1<<h.Rank) != 0
}
