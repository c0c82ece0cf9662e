package store

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// insert makes the entry in the nearest level that takes it.
func (s *Store) insert(ctx context.Context, p *Put, q *PutRequest) error {
	p.ask()
	var err error
	levels := q.levels(s)
	var nearer *level // where it would be now, if memory were there
	for _, l := range levels {
		if nearer != nil && q.copy == nil { // this level would judge it later, when it was demoted
			c := l.candidate(p, q)
			if admitted, asked := l.Admits(&c, p.class.Namespace); asked && !admitted {
				break // it waits for the memory
			}
		}
		if err = l.insert(ctx, p, q, true); err == nil || !refusedHere(err) {
			break
		}
		if nearer == nil && errors.Is(err, errAllocating) {
			nearer = l
		}
	}
	switch {
	case nearer == nil:
	case err == nil:
		nearer.early.add(early{p.root, p.mark})
	case refusedHere(err):
		err = nearer.insert(ctx, p, q, false)
	}
	return err
}

// refusedHere says of an entry that another root may take it: this one is out of service, has no room, or has used up its write budget.
func refusedHere(err error) bool {
	return errors.Is(err, ErrNoSpace) || errors.Is(err, ErrRootOut) || errors.Is(err, ErrRefused) || errors.Is(err, errAllocating)
}

// insert makes the entry in the level. The root that the place policy chose counts if it is there. Memory that is not there yet is waited
// for, unless now says that it is not.
func (l *level) insert(ctx context.Context, p *Put, q *PutRequest, now bool) error {
	tenant := l.store.catalog.Tenants.Number(q.Tenant)
	r, err := l.enter(ctx, p)
	if err != nil {
		return err
	}
	defer r.endTurn()
	parent := kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent)
	if now && r.isAllocating(p.entryBytes()) {
		return errAllocating
	}
	if err := r.budget.charge(p, p.entryBytes(), parent); err != nil {
		return err
	}
	p.begin(r)
	p.place()
	enter := func() error { return p.addEntry(tenant, parent, q) }
	w := reservation{Want: r.want(tenant, p.entryBytes()), slot: true, reuseFor: p, enter: enter}
	if q.copy != nil && !q.copy.entry.Leaves() { // what it is a copy of is there, and what goes for it may have none
		hits, _ := q.copy.entry.Worth()
		w.spares = max(1, hits)
	}
	if err := r.owner.reserve(ctx, w); err != nil {
		return p.shed(err)
	}
	return nil
}

// isAllocating says that memory for so many bytes more will be there, and is not yet.
func (r *root) isAllocating(bytes int64) bool {
	there, more := r.allocated()
	return more && r.Account.Figures().Used+bytes > there
}

// allocated is the memory that is there, and whether more will be.
func (r *root) allocated() (bytes int64, more bool) {
	if !r.cfg.Volatile {
		return 0, false
	}
	space, err := r.cfg.FS.Statfs(r.Path)
	if err != nil || space.Available == space.Free {
		return 0, false
	}
	return space.Total - space.Free + space.Available, true
}

// ready is how many bytes more can be taken at once without anything going.
func (r *root) ready() int64 {
	room := -r.Account.Excess(1)
	if there, more := r.allocated(); more {
		room = min(room, there-r.Account.Figures().Used)
	}
	return room
}

// addEntry makes the entry, with bytes that are reserved. The lock is held.
func (p *Put) addEntry(tenant uint16, parent uint64, q *PutRequest) error {
	r := p.root
	if err := r.owner.mayEnter(p.class, &p.key, p.mark.Fingerprint); err != nil {
		return err
	}
	if len(r.store.levels) > 1 && r.Index.Find(p.mark.Fingerprint, p.class.Base, &p.key) != index.None {
		return ErrResident // a copy and a put of its key are made at the same time
	}
	slot, err := r.Insert(&entries.New{
		Fingerprint: p.mark.Fingerprint, Class: p.class, Key: &p.key, Parent: parent, Depth: q.Depth, Tenant: tenant,
		Rank: p.rank, Reserved: p.entryRanks(), Stored: p.stamp, Request: q.Request, Copied: p.copy != nil,
	})
	if err != nil {
		return err
	}
	p.mark.Slot = slot
	r.leaving.Wake()
	return nil
}

// enter chooses the root of a new entry and takes the root's turn. A root can be taken out while the turn is waited for;
// then another is chosen.
func (l *level) enter(ctx context.Context, p *Put) (*root, error) {
	refreshFacts(l.store)
	for {
		r, err := l.choose(p.chosen)
		if err != nil {
			return nil, err
		}
		freeSpace{r}.refresh()
		if err := r.turn(ctx, p.tenant); err != nil {
			return nil, err
		}
		if r.Health.Takes() {
			return r, nil
		}
		r.endTurn()
	}
}
