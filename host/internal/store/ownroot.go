package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// ownRoot is the [kind] of a directory that this host has for itself: it evicts, gives entries the bytes of all their
// ranks, needs no records of other hosts, and settles a put or an eviction here and now.
type ownRoot struct {
	r *root

	evicting *staging.Turns     // the turn: held by the one reservation that may evict
	victims  []entries.Eviction // of the turn's holder
	leaving  moves.Leaving      // for the next level
	// unlinksAll says that no put gets a victim's file.
	unlinksAll bool
}

func newOwnRoot(r *root) *ownRoot {
	c := &ownRoot{r: r, evicting: staging.NewTurns(1)}
	c.leaving.From, c.leaving.Mover, c.leaving.Takes = &r.origin, r.store.mover, r.Health.Takes
	if c.leaving.Ahead = moves.AheadBack; r.cfg.Write == WriteThrough || r.offers() {
		c.leaving.Ahead, c.leaving.Kept = moves.AheadThrough, moves.Through
	}
	c.leaving.Init()
	if below := r.level.below(); below != nil {
		c.leaving.To = below
	} else if r.offers() {
		c.leaving.To, c.leaving.Peers = &peerLevel{r.store.levels[len(r.store.levels)-1]}, true
		c.leaving.Takes = func() bool { return r.Health.Takes() && r.store.lender().Takes() }
	}
	r.OwnDirs()
	r.guardDirectory(c, true)
	return c
}

func (c *ownRoot) file(base string) string                  { return base }
func (c *ownRoot) ownsTemp(string) bool                     { return true }
func (c *ownRoot) mayInsert(*Put) error                     { return nil }
func (c *ownRoot) mayAwait(kv.Key) error                    { return nil }
func (c *ownRoot) entryRanks(_ uint32, ranks uint64) uint64 { return ranks }
func (c *ownRoot) aborted(*Put)                             {} // the entry keeps the bytes for a put that tries again
func (c *ownRoot) giveBack(*Put)                            {}
func (c *ownRoot) grants() bool                             { return true }
func (c *ownRoot) drain(context.Context)                    {}
func (c *ownRoot) leave()                                   {}
func (c *ownRoot) step(context.Context)                     {}
func (c *ownRoot) stats() *SharedStats                      { return nil }
func (c *ownRoot) removeTemp(p *Put)                        { c.discard(p.temp, p.class.FileBytes()) }
func (c *ownRoot) dropped(p *Put)                           { c.discard(p.target, p.class.FileBytes()) }
func (c *ownRoot) offer()                                   { c.leaving.Step() }

func (c *ownRoot) openTemp(p *Put) (staging.File, error) {
	return c.r.FS.OpenFile(p.temp, os.O_RDWR, 0)
}

// createTemp implements [kind]: a temporary is next to its target, in directories that are made for it.
func (c *ownRoot) createTemp(p *Put) (f staging.File, err error) {
	p.temp = c.r.store.seq.TempName(p.target)
	f, err = staging.OpenDirect(c.r.FS, p.temp, newTemp, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		f, err = c.createInDir(p)
	}
	if err != nil {
		return nil, err
	}
	return c.r.metered(f), nil
}

func (c *ownRoot) createInDir(p *Put) (f staging.File, err error) {
	err = c.r.InDir(p.target, func() (err error) {
		f, err = staging.OpenDirect(c.r.FS, p.temp, newTemp, 0o600)
		return err
	})
	return f, err
}

func (c *ownRoot) publish(p *Put, info staging.Info) error {
	// Its directory may have gone since, if the put got another name.
	err := c.r.InDir(p.target, func() error { return c.r.FS.RenameNoReplace(p.temp, p.target) })
	if err == nil {
		p.temp = ""
		return nil
	}
	if health.Judge(err).Untouched() {
		return err
	}
	now, look := c.r.FS.Stat(p.target)
	switch {
	case look == nil && now.Same(info): // it happened all the same, as on a network file system that lost the reply
		return nil
	case errors.Is(err, fs.ErrExist), files.Misled(err) && p.name != "": // as another file is there, or on the way
	case look != nil && !errors.Is(look, fs.ErrNotExist):
		c.r.Log.Error("publication failed, perhaps after the rename; will look again, its bytes stay in the account",
			"file", p.target, "error", err, "look", look)
		left := c.discard(p.temp, 0) // one file has one of the names
		p.temp = ""
		c.r.Orphans.AddRenamed(p.target, info, pieceformat.Padded(info.Allocated)-left)
	case health.Hung(err):
		c.r.Orphans.AddRenamed(p.target, info, 0)
	}
	return err
}

func (c *ownRoot) published(m entries.Mark) { c.keep(m, WriteThrough) }

func (c *ownRoot) loaded(m entries.Mark) { c.keep(m, WriteHits) }

// keep copies an entry to the next level where the root writes that soon.
func (c *ownRoot) keep(m entries.Mark, on Write) {
	if c.r.cfg.Write >= on && c.leaving.To != nil && !c.leaving.Peers && !c.r.store.copies.Several(m.Fingerprint) {
		c.leaving.Through(m)
	}
}

// forget implements [kind]. A file that stays is tried again at the next start.
func (c *ownRoot) forget(dir, base string) {
	for _, dir := range pieceformat.Copies(dir) {
		if err := c.r.FS.Remove(c.r.Slash + dir + "/" + base); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.r.Log.Warn("file that nothing needs not removed; the next start tries again", "file", base, "error", err)
		}
	}
}

func (c *ownRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	switch cause := fmt.Errorf("%w: key %s", pieceformat.ErrWrongPiece, h.Key); {
	case damage != nil:
		c.r.Quarantine.Isolate(p.target, damage)
	case p.name == "":
		c.r.Quarantine.Isolate(p.target, cause)
	default:
		return p.leaveName(cause)
	}
	return nil
}

func (c *ownRoot) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	for rank := range entries.Ranks(pieces) {
		n, err := c.r.Remove(c.r.victim(v, rank), v.Class.FileBytes())
		if c.vanished(err); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = err
		}
		left += n
	}
	return left, failed
}

// vanished counts a file that another program has removed.
func (c *ownRoot) vanished(err error) {
	if errors.Is(err, fs.ErrNotExist) {
		c.r.Counted(&c.r.Count.Vanished)
	}
}

// unlinkVictim is unlink for a victim. Where not even its first file can be unlinked it stays, all of it: its bytes would not
// be free.
func (c *ownRoot) unlinkVictim(v *entries.Eviction, pieces uint64) (left int64, stays bool, failed error) {
	if pieces != 0 && pieces == v.Pieces {
		err := c.r.Unlink(c.r.victim(v, uint32(bits.TrailingZeros64(pieces))))
		c.vanished(err)
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			pieces &= pieces - 1
		case health.Judge(err) != health.Unanswered: // else it may go yet
			return 0, true, err
		}
	}
	left, failed = c.unlink(v, pieces)
	return left, false, failed
}

func (c *ownRoot) unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error) {
	r := c.r
	k, _ := r.Quarantine.Move(name, v.Class.FileBytes(), cause)
	_, _ = c.unlink(v, v.Pieces&^(1<<rank)) // it logs what fails, and retries
	r.Lock()
	r.Release(v, k.Bytes) // the quarantine has them
	excess := r.Quarantine.Add(k)
	r.Unlock()
	r.Quarantine.Remove(excess)
}

func (c *ownRoot) discard(name string, most int64) (left int64) { return c.r.Discard(name, most) }
func (c *ownRoot) lockOut(context.Context) error                { return c.unshared() }
func (c *ownRoot) identify() (empty bool, err error)            { return c.r.directory.Adopt() }
func (c *ownRoot) judge() scanJudge                             { return ownJudge{} }

func (c *ownRoot) recover(ctx context.Context) error {
	if err := c.find(ctx); err != nil {
		return err
	}
	c.r.warnOfSpace(func(s staging.Space) int64 { // before a scan what is in use counts as the root's own
		return c.r.Account.Figures().Used + s.Available
	})
	return nil
}

// find takes what a checkpoint tells, or begins a scan, and counts directories where they count.
func (c *ownRoot) find(ctx context.Context) error {
	r := c.r
	ok, err := r.recovery.takeCheckpoint(ctx)
	if err != nil {
		return err
	}
	if !ok {
		err = r.recovery.beginScan()
	} else {
		c.evictDown(ctx)
		close(r.scanned)
		err = ctx.Err()
	}
	if err == nil && !r.cfg.ForPieces {
		r.store.work.Go(func() { r.CountDirs(r.store.run) })
	}
	return err
}

func (c *ownRoot) scan(ctx context.Context) error {
	if err := c.r.recovery.scan(ctx); err != nil {
		return err
	}
	c.evictDown(ctx)
	return ctx.Err()
}

func (c *ownRoot) start() {
	if s := c.r.store; c.leaving.To != nil {
		s.work.Go(func() { c.leaving.Run(s.run) })
	}
}

func (c *ownRoot) save() {
	c.r.recovery.saveCheckpoint()
}

// unshared says who shares a root that this host wants for itself.
func (c *ownRoot) unshared() error {
	entries, err := c.r.FS.ReadDir(c.r.Path + "/" + shared.Dir + "/hosts")
	if errors.Is(err, fs.ErrNotExist) || files.Misled(err) || err == nil && len(entries) == 0 {
		return nil
	} else if err != nil {
		return fmt.Errorf("store: root %s: %w", c.r.Path, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return fmt.Errorf("%w: %s is shared by %s: stop them, or set shared = true here too; "+
		"remove what is in %s/hosts of hosts that were killed",
		ErrRootBusy, c.r.Path, strings.Join(names, ", "), c.r.Path+"/"+shared.Dir)
}

// memoryRoot is the [kind] of a root in memory, which one host has for itself: an [ownRoot] that is empty after a start. At
// an orderly end it copies what it holds to the next level. Its capacity is a part of memory whatever its file system says.
type memoryRoot struct{ *ownRoot }

func (c memoryRoot) recover(ctx context.Context) error { return c.find(ctx) }

func (c memoryRoot) drain(ctx context.Context) {
	if c.leaving.To == nil || c.leaving.Peers || !c.r.Health.Serves() {
		return
	}
	kept, left := c.leaving.Drain(ctx)
	log := c.r.Log.Info
	if left > 0 {
		log = c.r.Log.Warn
	}
	log("what the root held was copied to the next level", "entries", kept, "left", left, "to_level", c.leaving.To.Number(), "setting",
		"move.shutdown")
}

// objectRoot is the [kind] of a root in a bucket, which only this host writes: an [ownRoot] of a file system that has no
// temporaries that others could see, and no files that can be written again.
type objectRoot struct{ *ownRoot }

func newObjectRoot(r *root) objectRoot {
	c := objectRoot{newOwnRoot(r)}
	c.unlinksAll = true
	return c
}

func (c objectRoot) identify() (empty bool, err error) {
	if empty, err = c.ownRoot.identify(); err == nil {
		err = c.r.answers(pieceformat.ProbeFile)
	}
	return empty, err
}

// answers fails unless the server of a bucket answers. Only requests tell: the root itself, and temporaries, are there without one.
func (r *root) answers(probe string) error {
	bare, name := r.Health.Bare(), r.Slash+probe
	err := pieceformat.ReplaceFile(bare, r.store.seq.TempName(name), name, true, pieceformat.Holding([]byte("kvhost probe\n")))
	if err == nil {
		err = errors.Join(health.ReadThrough(bare, name, pieceformat.Page), bare.Remove(name))
	}
	return err
}

// scan implements [kind]. After it entries are complete, but for what policies and tenants' accounts need to know.
func (c objectRoot) scan(ctx context.Context) error {
	c.r.recovery.from, _ = c.r.cfg.FS.(lister)
	err := c.ownRoot.scan(ctx)
	if err == nil {
		c.r.store.work.Go(func() { c.r.recovery.describe(c.r.store.run) })
	}
	return err
}

// ownJudge is the [scanJudge] of a root that one host has for itself: what is of no use is moved or removed.
type ownJudge struct{}

// Found implements [scanJudge].
func (j ownJudge) Found(c *scan, rel, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64) {
	if twice := c.Add(cl, h, name, allocated); twice.Other != "" {
		j.choose(c, twice, rel, name, cl, h, allocated)
	}
}

// choose ends a conflict: a piece is there twice, as after a power failure that has undone an unlinking, or where a policy
// has named it twice. The file goes that stands under another name than its header has, or else the one that was met last.
func (j ownJudge) choose(
	c *scan, twice entries.Twice, rel, given string, cl *catalog.Class, h *pieceformat.Header, allocated int64,
) {
	d := c.by.kept
	name, other := d.Slash+rel, d.Slash+twice.Other
	there, info, err := d.Look(other)
	switch {
	case err == nil && cl.IsPiece(&there, &h.Key, h.Rank):
		if was, _ := nameAt(cl, h, twice.Other); h.Name == given && there.Name != was &&
			j.rename(c, twice.Mark, given, h.Rank, allocated-pieceformat.Padded(info.Allocated), true) {
			name = other
		}
		d.Discard(name, allocated)
		return
	case err != nil && pieceformat.IsDamage(err):
		d.Quarantine.Isolate(other, err)
	case err != nil && !errors.Is(err, fs.ErrNotExist) && !files.Misled(err):
		c.unreadable(name, err)
		return
	}
	j.rename(c, twice.Mark, given, h.Rank, 0, false)
}

// rename gives a piece of an entry another name and so many more bytes; with unused only if nothing uses the entry.
func (ownJudge) rename(c *scan, of entries.Mark, name string, rank uint32, more int64, unused bool) bool {
	s := c.by.set
	s.Lock()
	defer s.Unlock()
	if !s.Stands(of) || s.Index.Pieces(of.Slot)&(1<<rank) == 0 || unused && (s.Busy(of.Slot) || s.Index.At(of.Slot).Pins() > 0) {
		return false
	}
	s.Index.Rename(of.Slot, rank, name)
	entries.Rebook(s, of.Slot, s.Index.Bytes(of.Slot)+more)
	return true
}

// Unsound implements [scanJudge]. A file that is no piece is the store's by its built-in name, or because a piece's first page
// is written last: after a power failure it may hold zeros.
func (j ownJudge) Unsound(c *scan, name, rel string, info staging.Info, err error) {
	d := c.by.kept
	switch {
	case errors.Is(err, pieceformat.ErrNotPiece) || errors.Is(err, pieceformat.ErrDamaged) && info.Size < pieceformat.Page:
		if !pieceformat.IsBuiltin([]byte(rel)) && !d.Blank(name) {
			c.by.count.Foreign.Add(1)
			return
		}
		d.Quarantine.Isolate(name, err)
	case pieceformat.IsDamage(err):
		d.Quarantine.Isolate(name, err)
	default:
		c.unreadable(name, err)
	}
}

// Unknown implements [scanJudge]. A file that will never have a class, because there is no text of its namespace or because
// it cannot be of it, is moved away.
func (j ownJudge) Unknown(c *scan, name string, _ int64, err error) {
	if !errors.Is(err, catalog.ErrUnknownNamespace) && !errors.Is(err, catalog.ErrAlien) {
		c.unreadable(name, err)
		return
	}
	c.by.count.Unclaimed.Add(1)
	c.by.kept.Quarantine.Isolate(name, err)
}
