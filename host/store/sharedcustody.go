package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/staging"
)

// leftToEvictor is the part of custody that the evictor of a shared root has, or nobody.
type leftToEvictor struct{}

func (c *sharedRoot) ranks(p *Put) uint64                { return 1 << p.rank } // other hosts may write the others, on their credit
func (leftToEvictor) evicts() bool                       { return false }
func (leftToEvictor) notPublished(*Put, error)           {} // the evictor clears the temporaries
func (leftToEvictor) makeTempDir(p *Put) error           { return fs.ErrNotExist }
func (c *sharedRoot) temp(beside string) (string, error) { return c.member.Temp(filepath.Base(beside)) }
func (leftToEvictor) reusesFiles() bool                  { return false } // another host may be reading a victim
func (leftToEvictor) within() bool                       { return true }
func (leftToEvictor) forget(string)                      {} // another host may have use for it
func (c *sharedRoot) suffix() string                     { return "." + c.root.store.cfg.HostID }
func (c *sharedRoot) ownsTemp(host string) bool          { return host == c.root.store.cfg.HostID }
func (c *sharedRoot) grants() bool                       { return c.member.Fresh() }
func (c *sharedRoot) judge() recovery.Judge              { return sharedJudge{c} }
func (leftToEvictor) start()                             {}
func (leftToEvictor) save()                              {}

func (c *sharedRoot) waitsFor(p *Put) error {
	return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, p.key, c.root.Path)
}

func (c *sharedRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	if damage == nil {
		return fmt.Errorf("the name is of key %s: %w", h.Key, pieceformat.ErrWrongPiece)
	}
	bad := p.record()
	bad.Pieces, bad.Bytes = 1<<p.rank, 0
	c.propose(bad)
	return fmt.Errorf("a damaged file has the name: %w", damage)
}

func (c *sharedRoot) aborted(p *Put) { c.root.Unreserve(p.mark.Slot, p.rank, p.class.FileBytes()) }

func (c *sharedRoot) unlinkDamaged(v *entries.Eviction, _ uint32, name string, cause error) {
	c.root.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	v.Left, _ = c.unlink(v, v.Pieces)
}

func (c *sharedRoot) discard(name string, most int64) (left int64) {
	if !strings.HasPrefix(name, c.root.Slash+pieceformat.MetaDir) {
		c.overlook(most) // published: others may have it
		return 0
	}
	return c.root.Discard(name, most)
}

func (c *sharedRoot) identify() (empty bool, err error) {
	if err = c.root.directory.Same(); err != nil {
		err = fmt.Errorf("%w, and shared: restart kvhost to join it", err)
	}
	return false, err
}

// joinTimeout is how long a host waits for others that are joining.
const joinTimeout = 5 * time.Second

// lockOut takes the lock that a host on its own would have, until this one has joined.
func (c *sharedRoot) lockOut(ctx context.Context) (err error) {
	r := c.root
	for begun := r.store.cfg.Now(); ; {
		c.gate, err = r.FS.Lock(r.Path + "/" + pieceformat.LockFile)
		if !errors.Is(err, staging.ErrLocked) {
			break
		}
		if r.store.cfg.Now().Sub(begun) > joinTimeout {
			return fmt.Errorf("%w: %s: %w; a host has it for itself: stop it, or set shared = true there too", ErrRootBusy, r.Path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s: %w", ErrRootBusy, r.Path, ctx.Err())
		case <-time.After(joinTimeout / 100):
		}
	}
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.Path, err)
	}
	return nil
}

// unlockJoin lets other hosts join.
func (c *sharedRoot) unlockJoin() {
	if c.gate != nil {
		_ = c.gate.Close() // the lock goes with the descriptor
		c.gate = nil
	}
}
