package storetest

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

func (n operator) runLookup(op Op) (string, error) {
	of := parsePiece(op.get("entry"))
	l, err := n.lookup(of.Entry, int(op.number("n")), 0)
	if err != nil {
		return "", err
	}
	n.loadAll(l, op.get("ranks"))
	if op.has("hold") && n.leases[op.number("hold")] == nil {
		n.leases[op.number("hold")] = l
	} else {
		l.Release()
	}
	return fmt.Sprintf("%d hits", l.Hits()), nil
}

func (n operator) runRelease(op Op) (string, error) {
	l := n.leases[op.number("lease")]
	if l == nil {
		return "no such lease", nil
	}
	n.loadAll(l, op.get("ranks")) // what a lease is on stays
	l.Release()
	delete(n.leases, op.number("lease"))
	return "", nil
}

// lookup asks for a run of keys.
func (n *node) lookup(from Entry, count int, ranks uint64) (*lease, error) {
	l := &lease{n: n, lost: map[Entry]bool{}, doubted: n.doubted.Load()}
	began := n.r.model.tick()
	var keys []uint64
	for i := range uint64(count) {
		l.keys = append(l.keys, Entry{from.Space, from.Key + i})
		keys = append(keys, from.Key+i)
	}
	var err error
	if l.Lease, err = n.store.Lookup(from.Space, keys, ranks); err != nil {
		return nil, fmt.Errorf("host %s: looking %d keys up from %s: %w", n.ID, count, from, err)
	}
	if n.r.h.Kind.exact() && !l.doubted && ranks == 0 {
		l.granted = l.keys[:l.Hits()]
		l.did(granted, began)
	}
	return l, nil
}

// did notes what was done with all that a lease is on.
func (l *lease) did(verb string, began int64) {
	for _, e := range l.granted {
		for rank := range uint32(numRanks) {
			l.n.r.model.did(Piece{e, rank}, act{verb: verb}, began)
		}
	}
}

// doubt ends what a lease promises: the others gave its host up, or may have.
func (l *lease) doubt() {
	l.did(ended, l.n.r.model.tick())
	l.granted, l.doubted = nil, true
}

// Release ends the lease.
func (l *lease) Release() {
	began := l.n.r.model.tick()
	l.Lease.Release()
	l.did(ended, began)
}

// runDiscard discards a run of keys. An entry that was removed is no hit until it is stored again, and none that a
// lease has is removed: its loads would fail.
func (n operator) runDiscard(op Op) (string, error) {
	of := parsePiece(op.get("entry"))
	results, err := n.discard(of.Entry, int(op.number("n")))
	if err != nil {
		return "", err
	}
	for i, result := range results {
		e := Entry{of.Space, of.Key + uint64(i)}
		if there, err := n.hit(e); err != nil {
			return "", err
		} else if there && result == store.DiscardRemoved {
			return "", fmt.Errorf("host %s: %s was discarded and is a hit", n.ID, e)
		}
	}
	return fmt.Sprint(results), nil
}

func (n *node) discard(from Entry, count int) ([]store.DiscardResult, error) {
	var keys []uint64
	for i := range uint64(count) {
		keys = append(keys, from.Key+i)
	}
	began := n.r.model.tick()
	results, err := n.store.Discard(from.Space, keys)
	if err != nil {
		return nil, fmt.Errorf("host %s: discarding %d keys from %s: %w", n.ID, count, from, err)
	}
	for i, key := range keys {
		// What goes from a shared root is a hit of the others until its evictor has asked them.
		for rank := range uint32(numRanks) {
			if k := &n.r.h.Kind; k.exact() && k.hosts == 1 && results[i] == store.DiscardRemoved {
				n.r.model.did(Piece{Entry{from.Space, key}, rank}, act{verb: discarded}, began)
			}
		}
	}
	return results, nil
}

// loadAll loads of the i-th hit of a lease the rank that ranks says.
func (n *node) loadAll(l *lease, ranks string) {
	for i := range min(l.Hits(), len(ranks)) {
		n.load(l, i, uint32(ranks[i]-'0'))
	}
}

func (n *node) load(l *lease, i int, rank uint32) {
	of := Piece{l.keys[i], rank}
	n.r.loads.Add(1)
	began := n.r.model.tick()
	payload, err := l.Load(i, rank)
	n.r.ended.Add(1)
	if err == nil {
		err = n.r.model.served(of, payload, began)
	} else {
		err = n.judge(l, of, err)
	}
	if err != nil {
		n.r.report(fmt.Errorf("host %s: %w", n.ID, err))
	}
}

// judge says whether a load may fail. The engine computes its blocks again.
func (n *node) judge(l *lease, of Piece, failed error) error {
	r, k := n.r, &n.r.h.Kind
	if n.armed && errors.Is(failed, faultfs.ErrInjected) {
		return nil // its process is dying
	}
	if k.many { // somebody else may have stored it again meanwhile
		excused := r.rules != nil && errors.Is(failed, faultfs.ErrInjected)
		if !isLoss(failed) && !errors.Is(failed, store.ErrRootOut) && !excused {
			return fmt.Errorf("loading piece %s: %w", of, failed)
		}
		return nil
	}
	if k.lives {
		excused := isAny(failed, faultfs.ErrPowerLost, fs.ErrNotExist)
		if n.owed.owes(of.Entry) && !excused {
			return fmt.Errorf("piece %s was durable, and loading it fails: %w", of, failed)
		}
		return nil
	}
	if !r.model.isDamaged(of.Entry) && !l.lost[of.Entry] && r.rules == nil && !k.power && !l.doubted {
		return fmt.Errorf("loading piece %s: %w", of, failed)
	}
	if errors.Is(failed, faultfs.ErrInjected) { // of the device, which may answer again: no verdict on the entry
		return nil
	}
	if !isLoss(failed) || l.doubted && errors.Is(failed, store.ErrGone) { // its host may have found the entry again
		return nil
	}
	if l.lost[of.Entry] { // it went before, and may have been stored again
		return nil
	}
	l.lost[of.Entry] = true
	for _, o := range n.leases {
		o.lost[of.Entry] = true
	}
	if there, err := n.hit(of.Entry); err != nil {
		return err
	} else if there && k.levels {
		return n.loadFurther(of, failed)
	} else if there {
		return fmt.Errorf("piece %s is a hit after a load failed: %w", of, failed)
	}
	if k.hosts == 1 { // other hosts do not know yet
		r.model.setDamaged(of.Entry, false)
	}
	return nil
}

// loadFurther loads a piece again after a load found the nearest copy bad: the levels behind may have copies, of which
// each is whole, or is lost as well.
func (n *node) loadFurther(of Piece, failed error) error {
	for range n.r.h.Kind.roots - 1 {
		l, err := n.lookup(of.Entry, 1, 0)
		if err != nil {
			return err
		}
		if l.Hits() == 0 {
			l.Release()
			return nil
		}
		began := n.r.model.tick()
		payload, err := l.Load(0, of.Rank)
		l.Release()
		if err == nil {
			return n.r.model.served(of, payload, began)
		}
		if !isLoss(err) {
			return nil
		}
		if there, err := n.hit(of.Entry); err != nil || !there {
			return err
		}
	}
	return fmt.Errorf("piece %s is a hit after a load from every level failed: %w", of, failed)
}

// readAll reads every piece that is there. After a crash those of entries too that lack the other one: damage is to be
// found before the entry is complete again.
func (n *node) readAll() error {
	for space := range namespaces {
		for key := range uint64(numKeys) {
			for rank := range uint32(numRanks) {
				ranks := uint64(0)
				if n.r.h.Kind.lives {
					ranks = 1 << rank
				}
				l, err := n.lookup(Entry{space, key}, 1, ranks)
				if err != nil {
					return err
				}
				if l.Hits() == 1 {
					n.load(l, 0, rank)
				}
				l.Release()
			}
		}
	}
	return n.r.reported()
}
