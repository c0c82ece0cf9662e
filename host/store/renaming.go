package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/store/catalog"
)

// renaming watches a root's pieces whose place policy is in quarantine: they get the built-in names, and nobody depends
// on the policy any more. It also looks into the files when many are not where their policy says. On a shared root the
// names are not this host's alone, so nothing is renamed there.
type renaming struct {
	busy   atomic.Bool                            // one look at the files at a time
	looked atomic.Int64                           // when a doubted policy was right, in Unix nanoseconds
	at     map[*catalog.PlaceGeneration]time.Time // when a generation is due; for the upkeep only
	// settled are the generations in quarantine of which no piece is left under their names. What is stored later gets the
	// built-in names, so the index is not gone through again.
	settled sync.Map
}

// Pauses between two looks for pieces of one place policy.
const (
	renameAgain = 10 * time.Second // a put that was under way may have published one, and some may not have been renamed
	doubtAgain  = 10 * time.Minute // a doubted policy was right
)

// wakeUpkeep has the roots look now at what is due.
func (s *Store) wakeUpkeep() {
	if s.opened.Load() {
		for _, r := range s.roots {
			wake(r.upkeepWake)
		}
	}
}

// upkeep starts what is due.
func (n *renaming) upkeep(ctx context.Context, r *root) {
	if !r.rules.renames || r.IsScanning() || !r.Health.Takes() || r.unavailable.Load() {
		return
	}
	for _, g := range r.store.catalog.Generations() {
		quarantined := g.Policy.Quarantined()
		if _, settled := n.settled.Load(g); settled && quarantined && !r.Orphans.Lost(g) {
			continue
		} else if settled {
			n.settled.Delete(g)
		}
		now := r.store.cfg.Now()
		if quarantined && now.Before(n.at[g]) || !quarantined && !n.doubts(r, g) || !n.busy.CompareAndSwap(false, true) {
			continue
		}
		if !quarantined {
			r.store.work.Go(func() { n.look(ctx, r, g) })
			continue
		}
		if n.at == nil {
			n.at = map[*catalog.PlaceGeneration]time.Time{}
		}
		n.at[g] = now.Add(renameAgain)
		r.store.work.Go(func() { n.rename(ctx, r, g) })
	}
}

// doubts says whether the files are to be looked into for a place policy.
func (n *renaming) doubts(r *root, g *catalog.PlaceGeneration) bool {
	return (g.Doubted() || r.Orphans.Lost(g)) && r.store.cfg.Now().UnixNano()-n.looked.Load() >= int64(doubtAgain)
}

// look looks where the pieces of a doubted place policy are.
func (n *renaming) look(ctx context.Context, r *root, g *catalog.PlaceGeneration) {
	defer n.busy.Store(false)
	r.Log.Warn("pieces are not where their place policy says; looking for them", "policy", g.Label)
	if err := r.recovery.Misplaced(ctx, g); err != nil && ctx.Err() == nil {
		r.Log.Warn("pieces not looked for", "policy", g.Label, "error", err)
	}
	n.looked.Store(r.store.cfg.Now().UnixNano())
	g.Looked()
	wake(r.upkeepWake)
}

func (n *renaming) rename(ctx context.Context, r *root, g *catalog.PlaceGeneration) {
	defer wake(r.upkeepWake) // another policy may wait for this
	defer n.busy.Store(false)
	if !r.recovery.Named(g) && !r.Orphans.Lost(g) {
		n.settled.Store(g, struct{}{})
		return
	}
	renamed, left, err := r.recovery.RenamePieces(ctx, g)
	if ctx.Err() == nil {
		r.Log.Warn("pieces of a place policy in quarantine have the built-in names now", "policy", g.Label,
			"renamed", renamed, "left", left, "error", err)
	}
}

// expects says whether a piece that is not found may be found under its built-in name soon. A policy that does not
// repeat the name it gave is disqualified here. It did not give built-in names.
func (n *renaming) expects(p *Piece) bool {
	if p.fallback {
		return p.root.rules.renames && n.busy.Load()
	}
	if p.root.Missed(p.class, &p.key, p.rank, p.name) == nil {
		if !p.root.rules.renames || !n.doubts(p.root, p.class.Place) {
			return false
		}
		wake(p.root.upkeepWake)
		return true // who looks may find it
	}
	return p.root.rules.renames
}
