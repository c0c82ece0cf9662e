package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

// sole is the [owner] of a root that this host has for itself. It makes room by evictions, needs no records of other hosts, and
// completes a put or an eviction at once.
type sole struct {
	r       *root
	victims []entries.Eviction // buffer of the turn's holder
}

// newSole returns the sole owner of a root. Its entries may leave for the next level.
func newSole(r *root) *sole {
	c := &sole{r: r}
	r.evicting = staging.NewTurns(1)
	l := &r.leaving
	l.From, l.Mover, l.Takes = &r.origin, r.store.mover, r.Health.Takes
	if l.Ahead = moves.AheadBack; r.cfg.Write == WriteThrough || r.offers() {
		l.Ahead, l.Kept = moves.AheadThrough, moves.Through
	}
	l.Init()
	if below := r.level.below(); below != nil {
		l.To = below
	} else if r.offers() {
		l.To, l.Peers = &peerLevel{r.store.beyond}, true
		l.Takes = func() bool { return r.Health.Takes() && r.store.cfg.lender.Takes() }
	}
	r.OwnDirs()
	return c
}

func (c *sole) mayEnter(*catalog.Class, *kv.Key, uint64) error { return nil }
func (c *sole) grants() bool                                   { return true }
func (c *sole) leave()                                         {}
func (c *sole) settle(*Put, string, int64)                     {}
func (c *sole) withdraw(p *Put)                                { c.r.Discard(p.target, p.class.FileBytes()) }
func (c *sole) lock(context.Context) error                     { return c.unshared() }

// createTemp implements [owner]. A temporary is in the directory of its target, which is created if necessary.
func (c *sole) createTemp(p *Put) (f staging.File, err error) {
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

func (c *sole) createInDir(p *Put) (f staging.File, err error) {
	err = c.r.InDir(p.target, func() (err error) {
		f, err = staging.OpenDirect(c.r.FS, p.temp, newTemp, 0o600)
		return err
	})
	return f, err
}

func (c *sole) publish(p *Put, info staging.Info) error {
	// The directory may have been removed, or may never have existed if the put got another name.
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
	case look == nil && now.Same(info): // the rename succeeded in spite of the error, as on a network file system that lost the reply
		return nil
	case errors.Is(err, fs.ErrExist), files.Misled(err) && p.name != "": // another file has the name or blocks its path
	case look != nil && !errors.Is(look, fs.ErrNotExist):
		c.r.Log.Error("publication failed, perhaps after the rename; will look again, its bytes stay in the account",
			"file", p.target, "error", err, "look", look)
		left := c.r.Discard(p.temp, 0) // the file has one of the two names
		p.temp = ""
		c.r.Orphans.AddRenamed(p.target, info, pieceformat.Padded(info.Allocated)-left)
	case health.Hung(err):
		c.r.Orphans.AddRenamed(p.target, info, 0)
	}
	return err
}

func (c *sole) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
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

// recover implements [owner]. It restores the entries from a checkpoint or begins a scan, and counts directories if they count.
// A root of borrowed entries is empty at the start.
func (c *sole) recover(ctx context.Context) error {
	r := c.r
	if r.cfg.Lender != nil {
		close(r.scanned)
		return nil
	}
	ok, err := r.recovery.takeCheckpoint(ctx)
	if err != nil {
		return err
	}
	if !ok {
		err = r.recovery.beginScan()
	} else {
		r.evictDown(ctx)
		close(r.scanned)
		err = ctx.Err()
	}
	if err == nil && !r.cfg.ForPieces {
		r.store.work.Go(func() { r.CountDirs(r.store.run) })
	}
	if err == nil && !r.cfg.Volatile {
		r.warnOfSpace(func(s staging.Space) int64 { // before a scan, all bytes in use count as the root's own
			return r.Account.Figures().Used + s.Available
		})
	}
	return err
}

// scan implements [owner]. If files can be listed, entries are complete after the scan, except for the properties that policies
// and the accounts of tenants need.
func (c *sole) scan(ctx context.Context) error {
	r := c.r
	r.recovery.from, _ = r.cfg.FS.(lister)
	if err := r.recovery.scan(ctx); err != nil {
		return err
	}
	r.evictDown(ctx)
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.recovery.from != nil {
		r.store.work.Go(func() { r.recovery.describe(r.store.run) })
	}
	return nil
}

// unshared returns an error that names the hosts that share the root, if there are any.
func (c *sole) unshared() error {
	names, err := shared.Hosts(c.r.FS, c.r.Path)
	if err != nil {
		return fmt.Errorf("store: root %s: %w", c.r.Path, err)
	} else if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s is shared by %s: stop them, or set shared = true here too; "+
		"remove what is in %s/hosts of hosts that were killed",
		ErrRootBusy, c.r.Path, strings.Join(names, ", "), c.r.Path+"/"+shared.Dir)
}

// soleJudge is the [scanJudge] of a root that one host has for itself. It moves or removes unusable files.
type soleJudge struct{}

// Found implements [scanJudge].
func (j soleJudge) Found(c *scan, rel, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64) {
	if twice := c.Add(cl, h, name, allocated); twice.Other != "" {
		j.choose(c, twice, rel, name, cl, h, allocated)
	}
}

// choose resolves a conflict between two files of the same piece. There can be two after a power failure that has undone an
// unlink, or if a policy has given the piece two names. A file with another name than in its header is removed, or else the
// file that was found later.
func (j soleJudge) choose(
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

// rename changes the name of a piece and adds bytes to its entry. With unused set, it does so only if nothing uses the entry.
// It reports whether it did.
func (soleJudge) rename(c *scan, of entries.Mark, name string, rank uint32, more int64, unused bool) bool {
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

// Unsound implements [scanJudge]. A file that does not start like a piece belongs to the store if it has a built-in name. It
// also does if its first page holds zeros: that page is written last and can be missing after a power failure.
func (j soleJudge) Unsound(c *scan, name, rel string, info staging.Info, err error) {
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

// Unknown implements [scanJudge]. A file that can never get a class, because its namespace has no text or cannot have such a
// piece, is moved to quarantine.
func (j soleJudge) Unknown(c *scan, name string, _ int64, err error) {
	if !errors.Is(err, catalog.ErrUnknownNamespace) && !errors.Is(err, catalog.ErrAlien) {
		c.unreadable(name, err)
		return
	}
	c.by.count.Unclaimed.Add(1)
	c.by.kept.Quarantine.Isolate(name, err)
}
