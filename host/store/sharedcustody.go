package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/names"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/host/store/sharedroot"
	"github.com/kvhost/kvhost/staging"
)

// SharedStats is a root's part among the hosts that share it.
type SharedStats = shared.Stats

// Scheduler is for tests. A host that has one makes a step when [Store.Maintain] says so.
type Scheduler = sharedroot.Scheduler

// sharedRoot is the [custody] of a root that several hosts share.
type sharedRoot struct {
	*sharedroot.Root
	root *root
}

// sharedRules leave nearly everything to the evictor: another host may be reading a victim, writing other ranks of an
// entry, or have use for a file.
func sharedRules(host string) rules {
	return rules{suffix: "." + host, ownsTemp: func(of string) bool { return of == host }}
}

func newSharedRoot(r *root) *sharedRoot {
	s := r.store
	return &sharedRoot{root: r, Root: sharedroot.New(sharedroot.Config{
		Entries: &r.Set, Kept: r.kept, Host: s.cfg.HostID, Capacity: r.cfg.Capacity, High: s.cfg.High, Low: s.cfg.Low,
		Poll: r.cfg.Poll, Lapse: r.cfg.Lapse, Now: s.cfg.Now, Scheduler: r.cfg.Scheduler,
	})}
}

func (c *sharedRoot) reserve(ctx context.Context, w reservation) error {
	var credit *shared.Credit
	if w.reuseFor != nil {
		credit = &w.reuseFor.credit
	}
	return c.Reserve(ctx, w.Want, credit, func() error { return w.booked(c.root) })
}

func (c *sharedRoot) mayInsert(p *Put) error { return c.MayInsert(p.class, &p.key, p.mark.Fingerprint) }

func (c *sharedRoot) temp(p *Put, beside string) (string, error) { return c.Temp(beside, p.credit) }

func (c *sharedRoot) guard(p *Put, f staging.File) staging.File { return c.Guard(f, p.credit) }

func (c *sharedRoot) publish(p *Put, info staging.Info) error {
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	err := c.Publish(p.temp, p.target, rec, &p.credit)
	if err == nil || errors.Is(err, shared.ErrDoubt) {
		p.temp = "" // the member's
	}
	return err
}

func (c *sharedRoot) notPublished(*Put, staging.Info, error, error) {} // the evictor clears the temporaries

func (c *sharedRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	if damage == nil {
		cause := fmt.Errorf("the name is of key %s: %w", h.Key, pieceformat.ErrWrongPiece)
		if p.name == "" {
			return cause
		}
		return p.leaveName(cause)
	}
	bad := p.record()
	bad.Pieces, bad.Bytes = 1<<p.rank, 0
	c.ReportDamaged(p.class, bad)
	return fmt.Errorf("a damaged file has the name: %w", damage)
}

func (c *sharedRoot) giveBack(credit shared.Credit) { c.Return(credit) }

func (c *sharedRoot) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	c.Unlink(v, pieces)
	return 0, nil
}

func (c *sharedRoot) unlinkDamaged(v *entries.Eviction, _ uint32, name string, cause error) {
	c.root.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	c.Unlink(v, v.Pieces)
}

func (c *sharedRoot) discard(name string, most int64) (left int64) { return c.Discard(name, most) }

func (c *sharedRoot) lockOut(ctx context.Context) error { return c.LockOut(ctx) }
func (c *sharedRoot) identify() (empty bool, err error) { return false, c.Identify(c.root.directory) }
func (c *sharedRoot) recover(context.Context) error     { return c.Join(c.root.recovery) }
func (c *sharedRoot) scan(ctx context.Context) error    { return c.Scan(ctx) }
func (c *sharedRoot) judge() recovery.Judge             { return c.Judge() }
func (c *sharedRoot) grants() bool                      { return c.Fresh() }
func (c *sharedRoot) start()                            {}
func (c *sharedRoot) save()                             {}
func (c *sharedRoot) leave()                            { c.Leave() }
func (c *sharedRoot) step(ctx context.Context)          { c.Step(ctx) }
func (c *sharedRoot) stats() *SharedStats               { return c.Stats() }

// record describes the piece for the other hosts.
func (p *Put) record() shared.Record {
	var named []names.Name
	if p.name != "" {
		named = []names.Name{{Rank: p.rank, Path: p.name}}
	}
	return shared.Record{
		Op: shared.Published, Names: named, Namespace: p.class.Namespace.Digest, Group: p.class.Group, Rank: p.rank, Key: p.key, Parent: p.parent, Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}
